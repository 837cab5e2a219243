"""The model of a case, kept while consecutive cases can use it, with fresh weights for each.

Loading a model takes longer than timing a few steps of it, so cases with the same load (Case.load) share one. Before
each case the same weights are drawn again, so that losses are comparable. One model is freed before the next is loaded,
because two would not fit. The link is measured with copies of the model's usual unit, once per size.

The textbook loop gets the module of a resident model, after keyhole's memory for the weights is freed (textbook.py);
from then on only textbook cases can run on the model.
"""

import time
from typing import Any

import torch
from torch import nn

import keyhole
from keyhole.bench import measure
from keyhole.bench.link import measure_link
from keyhole.bench.process import Emit
from keyhole.bench.shapes import model_config
from keyhole.bench.zo.cases import Case
from keyhole.bench.zo.textbook import take_weights
from keyhole.methods.workload import Workload
from keyhole.methods.zo.traits import ZO, ZOConfig
from keyhole.model.weights.random import fill_random

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def workload(case: Case) -> Workload:
    """The workload for the memory plan."""
    return Workload(ZO.name, case.tokens, settings=ZOConfig(compile=case.compiled))


class ModelCache:
    """Keeps at most one model. emit: receives measurements of the link; quick: tiny shapes."""

    def __init__(self, emit: Emit, device: torch.device, quick: bool) -> None:
        self.emit, self.device, self.quick = emit, device, quick
        self.model: keyhole.Model | None = None
        self.key: tuple[Any, ...] | None = None
        self.lent = False  # the module is used by the textbook loop
        self.load_s = 0.0
        self.host_bytes = 0  # peak after loading
        self.vectors: list[tuple[nn.Parameter, torch.Tensor]] = []  # norms and biases, with their loaded values
        self.links: dict[int, dict[str, float]] = {}
        self.link: dict[str, float] | None = None

    @property
    def loaded(self) -> keyhole.Model:
        """The model that was loaded last."""
        assert self.model is not None
        return self.model

    def ready(self, case: Case) -> keyhole.Model:
        """The model of a case, loaded now or kept from the previous case; always with fresh weights."""
        textbook = case.system == "textbook"
        if case.load == self.key and textbook:
            self.lend()
            return self.loaded
        if case.load == self.key and not self.lent:
            self.refresh()
            return self.loaded
        self.close()
        begin_s = time.perf_counter()
        options: dict[str, Any] = {}
        if case.system == "streamed":
            options = {"overlap": case.overlap, "reuse_slots": case.reuse_slots, "gpu_memory": case.gpu_memory}
            options |= {"wire": case.wire} if case.wire else {}
        self.model = keyhole.load(
            model_config(case.model, case.length, case.blocks, self.quick),
            placement="stream" if case.system == "streamed" else "resident",
            dtype=DTYPES[case.dtype],
            device=self.device,
            init="random",
            workload=workload(case),
            **options,
        )
        self.key, self.load_s = case.load, time.perf_counter() - begin_s
        self.host_bytes = measure.host_memory()
        vectors = [t.param for t in self.model.layout.tensors if len(t.shape) < 2]
        self.vectors = [(param, param.data.to("cpu", copy=True)) for param in vectors]
        self.measure_link()
        if textbook:
            self.lend()
        return self.model

    def lend(self) -> None:
        """Prepares the module for the textbook loop, with the initial weights."""
        take_weights(self.loaded, {id(param): as_loaded for param, as_loaded in self.vectors})
        self.lent = True

    def refresh(self) -> None:
        """Draws the same weights again."""
        model = self.loaded
        model.apply_deferred()  # otherwise the last method's update would be applied to the new weights
        model.engine.wait_for_homes()
        std = getattr(model.config, "initializer_range", None) or 0.02
        for param, as_loaded in self.vectors:
            param.data = as_loaded
        fill_random(model, std, 0)
        model.binding.bind_homes()
        model.engine.invalidate()

    def measure_link(self) -> None:
        """Measures the link with copies of this model's usual unit, unless a similar size was measured already."""
        self.link = None
        homes = streamed_homes(self.loaded)
        if self.device.type != "cuda" or not homes:
            return
        sizes = sorted(home.numel() * home.element_size() for home in homes)
        unit_bytes = sizes[len(sizes) // 2]
        near = [size for size in self.links if 0.5 < size / unit_bytes < 2]
        if not near:
            self.links[unit_bytes] = measure_link(unit_bytes)
            self.emit({"kind": "link", **self.links[unit_bytes]})
        self.link = self.links[near[0] if near else unit_bytes]

    def close(self) -> None:
        """Frees the model; pinned pages are unpinned before they are freed."""
        if self.model is not None:
            self.model.close()
        self.model, self.key, self.vectors, self.lent = None, None, [], False
        measure.clear_device(self.device)


def streamed_homes(model: keyhole.Model) -> list[torch.Tensor]:
    return [model.engine.homes[i] for i in sorted(model.engine.streamed)]
