"""A streamed twin of a resident model, cut and run as the test likes, past the decisions of plan/placement.py."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import keyhole
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.offload.engine import Engine


def trained(method: Method) -> dict[str, torch.Tensor]:
    """What the method has trained: weights, and adapters beside them."""
    beside = {} if method.addon is None else method.addon.params
    return {name: x.detach().cpu().clone() for name, x in [*method.model.named_tensors(), *beside.items()]}


def assert_trained_alike(
    models: Iterable[Model], make: Callable[[Model], Method], steps: list[list[dict[str, torch.Tensor]]]
) -> None:
    """Losses, norms and what is trained are the same to the bit after these steps, at a rate that falls."""
    found = []
    for model in models:
        method, losses = make(model), []
        for batches in steps:
            losses.append(float(method.step(batches)))
            method.lr *= 0.9
        norm = float(method.metrics().get("grad_norm", 0.0))
        method.flush()
        found.append((losses, norm, trained(method)))
    assert len(found) > 1 and all(map(math.isfinite, losses))
    for losses, norm, after in found[1:]:
        assert (losses, norm) == found[0][:2] and after.keys() == found[0][2].keys()
        assert not [name for name, tensor in after.items() if not torch.equal(tensor, found[0][2][name])]


def under_random_delays(load: Callable[..., Model]) -> Iterator[Model]:
    """A model resident, then streamed twice, with streams delayed at random and freed slots poisoned."""
    for seed in range(3):
        engine = {"placement": "stream", "chaos": random.Random(seed), "slot_count": 2 + seed % 2} if seed else {}
        model = load(**engine)
        yield model
        model.close()


def streamed(
    resident: keyhole.Model,
    max_unit_numel: int | None = None,
    keep: tuple[str, ...] = (),
    config: Any = None,
    **engine_options: Any,
) -> Model:
    """The same weights, every unit behind the engine but the common unit and the kinds named in `keep`. config: of the
    whole, where the module knows only a part of it."""
    module = build(config or resident.config, resident.dtype)
    layout = find_layout(module, max_unit_numel)
    flat = torch.full((layout.numel,), float("nan"), dtype=resident.dtype)
    homes = list(flat.split([unit.numel for unit in layout.units]))
    away = {unit.index for unit in layout.units[1:] if unit.kind not in keep}
    model = Model(module, layout, Engine(homes, away, torch.device("cpu"), **engine_options), resident.formats)
    for mine, theirs in zip(layout.tensors, resident.layout.tensors, strict=True):
        assert mine.name == theirs.name and mine.start == theirs.start
        model.home(mine).copy_(resident.home(theirs))
    for name, buffer in resident.module.named_buffers():
        module.get_buffer(name).copy_(buffer)
    model.binding.bind_homes()
    return model
