"""Times first-order trials in a separate process (process.py); weights are drawn again for each trial.

    native     torch's optimizer on the plain Hugging Face module with its own gradient checkpointing: the baseline
    others     methods of keyhole, resident or streamed within a budget

Random weights of the true shapes; median of the timed steps.
"""

import dataclasses
import sys
import time
from typing import Any

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.gradient.native import Native
from keyhole.bench.gradient.own_products import own_products_s
from keyhole.bench.gradient.parts import step_parts, updates_alone_s
from keyhole.bench.gradient.trials import NATIVE, Trial
from keyhole.bench.link import measure_link
from keyhole.bench.process import Emit, Job, device_of, serve
from keyhole.bench.rates import product_rate
from keyhole.bench.shapes import llama_config
from keyhole.machine.sizes import MIB
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.workload import Workload

LR = 1e-5
QUICK_LENGTH = 16
UNIT_BYTES = 192 * MIB  # size of the copies that measure the link


class GradientWorker:
    """Loads, times and frees one trial after the other."""

    def __init__(self, emit: Emit, job: Job) -> None:
        self.job, self.device = job, device_of(job.device)

    def machine(self) -> dict[str, Any]:
        return {"product_rate": product_rate(self.device) if self.device.type == "cuda" else None}

    def estimate_s(self, trial: Trial) -> float:
        return 0.0

    def clear(self) -> None:
        measure.clear_device(self.device)

    def measure(self, trial: Trial) -> dict[str, Any]:
        found = self._timed(trial)
        self.clear()
        if self.device.type == "cuda" and trial.streamed:
            found["link"] = measure_link(UNIT_BYTES, rounds=3)
        return found

    def _timed(self, trial: Trial) -> dict[str, Any]:
        length = QUICK_LENGTH if self.job.quick else trial.length
        if self.job.quick:
            import keyhole.bench.gradient.traced  # noqa: F401  (the backend that quick trials compile with)
        begin_s = time.perf_counter()
        model = load_trial(trial, self.device, length, self.job.quick)
        found: dict[str, Any]
        found = {"load_s": time.perf_counter() - begin_s, "tokens": trial.micro_batches * trial.batch * length}
        measure.clean_up(self.device)
        method = method_of(trial, model)
        rows = trial.micro_batches * trial.batch
        together = measure.random_batch(rows, length, model.config.vocab_size)
        batch = [{k: x[i : i + trial.batch] for k, x in together.items()} for i in range(0, rows, trial.batch)]
        engine = model.engine
        found |= measure.time_steps(lambda: method.step(batch), engine, self.job.warm_up, self.job.timed)
        found["streamed_bytes"] = sum(engine.homes[i].numel() * engine.homes[i].element_size() for i in engine.streamed)
        found |= {"device": measure.device_memory(self.device), "host_bytes": measure.host_memory()}
        found |= {"weights_bytes": model.layout.numel * model.dtype.itemsize, "parts": step_parts(method)}
        planned = trial.system != NATIVE and METHODS[trial.system].streams  # the memory of baselines is not planned
        found["planned_bytes"] = model.placed.device_bytes.total if planned and model.placed is not None else None
        found["decided"] = model.describe() + method.describe()
        found["updates_alone_s"] = updates_alone_s(method)
        rounds = self.job.warm_up, self.job.timed
        found["own_products_s"] = own_products_s(dataclasses.asdict(trial), model.module, trial.batch * length, *rounds)
        model.close()
        return found


def load_trial(
    trial: Trial, device: torch.device, length: int, quick: bool = False, graphs: bool = True
) -> keyhole.Model:
    """The trial's model, with random weights, placed as the trial says."""
    work = Workload("eval", trial.batch * length, trial.micro_batches)  # of a baseline, whose memory is not planned
    if trial.system != NATIVE:
        kind = METHODS[trial.system].settings
        names = {f.name for f in dataclasses.fields(kind)}
        own = kind(**{name: value for name, value in trial.options.items() if name in names})
        work = dataclasses.replace(
            work, method=trial.system, settings=own, clips=trial.options.get("max_grad_norm") is not None
        )
    where: dict[str, Any] = {"placement": "stream"} if trial.streamed else {}
    where |= {"gpu_memory": trial.gpu_memory, "dtype": "float32" if quick else "bfloat16", "device": device}
    where["graphs"] = graphs
    return keyhole.load(llama_config(trial.shape, quick), init="random", workload=work, **where)


def method_of(trial: Trial, model: keyhole.Model) -> Method:
    """The trial's method on that model, or the baseline."""
    options = dict(trial.options)
    if options.pop("svd", True) is False:
        _leave_out_svd()
    kind = Native if trial.system == NATIVE else METHODS[trial.system].load()
    return kind(model, LR, **options)


def _leave_out_svd() -> None:
    """Replaces GaLore's SVD by random bases, for the rest of this process."""
    from keyhole.methods.baselines import galore

    def drawn(grad: torch.Tensor, rank: int) -> torch.Tensor:
        side = min(grad.shape[-2:])
        q: torch.Tensor = torch.linalg.qr(torch.randn(*grad.shape[:-2], side, rank, device=grad.device)).Q
        return q

    galore.projector = drawn


if __name__ == "__main__":
    sys.exit(serve(GradientWorker, Trial))
