"""Times the cases of one group in a separate process (process.py)."""

import sys
from typing import Any

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.process import Emit, Job, device_of, serve
from keyhole.bench.shapes import QUICK_SHRINK
from keyhole.bench.zo.cases import ELEMENT_BYTES, Case
from keyhole.bench.zo.model_cache import ModelCache, streamed_homes, workload
from keyhole.bench.zo.textbook import Textbook
from keyhole.machine.probe import workspace_bytes
from keyhole.methods.workload import Room
from keyhole.methods.zo.traits import ZO
from keyhole.model.weights.format import Wire

LR, EPS = 1e-7, 1e-3


class ZoWorker:
    """Measures case after case; keeps the model between cases if possible."""

    def __init__(self, emit: Emit, job: Job) -> None:
        self.job = job
        self.device = device_of(job.device)
        self.models = ModelCache(emit, self.device, job.quick)

    def machine(self) -> dict[str, Any]:
        return {}

    def clear(self) -> None:
        self.models.close()

    def estimate_s(self, case: Case) -> float:
        """Estimates the time for the weights, arithmetic, memory passes and the link."""
        if self.job.quick:
            return 0.0
        size, host = case.weight_bytes, case.system == "streamed"
        load_s = 0.0 if case.load == self.models.key else 4 + size / (6e9 if host else 1e11)
        flops_s = 40e12 if case.dtype == "fp32" else 400e12
        params = size / (4 if case.dtype == "fp32" else 2)
        step_s = 4 * params * case.tokens / flops_s + 20 * size / 3e12 + (size / 20e9 if host else 0)
        return load_s + (self.job.warm_up + self.job.timed) * step_s

    def measure(self, case: Case) -> dict[str, Any]:
        """Times the steps of a case; returns its measurements."""
        model = self.models.ready(case)
        measure.clean_up(self.device)  # memory for drawing the weights must not be reused by the method
        batch = self.batch(case)
        textbook = case.system == "textbook"
        method = Textbook(model.module, LR, eps=EPS) if textbook else self.method(model, case)
        measure.clean_up(self.device)
        found = measure.time_steps(lambda: method.step(batch), model.engine, self.job.warm_up, self.job.timed)
        return found | {
            "parameters": sum(t.shape.numel() for t in model.layout.tensors),
            "blocks_run": model.layout.block_count,
            "weights_bytes": model.layout.numel * ELEMENT_BYTES[case.dtype],
            "streamed_bytes": sum(h.numel() * h.element_size() for h in streamed_homes(model)),
            "planned_bytes": None if textbook else self.planned_bytes(model, case),
            "pinned": model.pinned,
            "device": measure.device_memory(self.device),
            "host_bytes": max(self.models.host_bytes, measure.host_memory()),
            "decided": model.describe(),
            "load_s": self.models.load_s,
            "link": self.models.link,
        }

    def method(self, model: keyhole.Model, case: Case) -> keyhole.ZO:
        compiled: bool | str = "aot_eager" if case.compiled and self.job.quick else case.compiled
        every = None if case.rare_write_backs else 1
        deferred = case.deferred_update
        return keyhole.ZO(model, LR, eps=EPS, compile=compiled, deferred_update=deferred, write_back_every=every)

    def planned_bytes(self, model: keyhole.Model, case: Case) -> int:
        """The planned device peak for this case's tokens (a load may serve several batch sizes)."""
        room = Room(Wire(model.dtype, case.wire), workspace_bytes(self.device))
        return ZO.planned_bytes(model.layout, model.engine.streamed, workload(case), room).total

    def batch(self, case: Case) -> dict[str, torch.Tensor]:
        length = max(4, case.length // QUICK_SHRINK) if self.job.quick else case.length
        return measure.random_batch(case.batch, length, self.models.loaded.config.vocab_size)


if __name__ == "__main__":
    sys.exit(serve(ZoWorker, Case))
