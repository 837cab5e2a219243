"""Measures the memory of one step, trial by trial, in a separate process (process.py).

The first step creates the optimizer's state and the libraries' workspaces; the second runs under the ledger
(ledger.py). The floor of each part follows from the shapes, for N parameters of b bytes, L blocks, M tokens, width H:

    weights       b N
    gradients     torch: b N, all of them at the end of the backward. A method that consumes each gradient at once: that
                  of the largest matrix
    state         torch's SGD 0, AdamW 2 b N and a count of 4 bytes per tensor; in fp32 beside 16-bit weights 4 N, 12 N
    activations   with checkpointing: b L M H, the inputs of the blocks; without, or in host memory: no floor
"""

import sys
from typing import Any

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.gradient.native import Native
from keyhole.bench.gradient.trials import NATIVE, Trial
from keyhole.bench.gradient.worker import QUICK_LENGTH, load_trial, method_of
from keyhole.bench.memory.ledger import ACTIVATIONS, GRADIENTS, STATE, WEIGHTS, Bytes, Ledger, Peaks
from keyhole.bench.process import Emit, Job, device_of, serve
from keyhole.methods.base import Method

MOMENTS = {"SGD": 0, "AdamW": 2}  # tensors of state per parameter
COUNT_BYTES = 4  # AdamW's step count, per tensor


class MemoryWorker:
    """Loads, measures and frees one trial after the other."""

    def __init__(self, emit: Emit, job: Job) -> None:
        self.job, self.device = job, device_of(job.device)

    def machine(self) -> dict[str, Any]:
        return {}

    def estimate_s(self, trial: Trial) -> float:
        return 0.0 if self.job.quick else 20.0

    def clear(self) -> None:
        measure.clear_device(self.device)

    def measure(self, trial: Trial) -> dict[str, Any]:
        length = QUICK_LENGTH if self.job.quick else trial.length
        model = load_trial(trial, self.device, length, self.job.quick, graphs=False)  # the ledger cannot see graphs
        method = method_of(trial, model)
        batch = measure.random_batch(trial.batch, length, model.config.vocab_size)
        method.step(batch)
        measure.clean_up(self.device)
        resident = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        peaks = peaks_of(method, model, batch)
        found = {
            "tokens": trial.batch * length,
            "own": peaks.own,
            "at_peak": peaks.at_peak,
            "floor": floors(trial, model, trial.batch * length),
            "device": measure.device_memory(self.device),
            "before_bytes": resident,
            "decided": model.describe() + method.describe(),
        }
        model.close()
        del model, method
        self.clear()
        return found


def peaks_of(method: Method, model: keyhole.Model, batch: dict[str, torch.Tensor]) -> Peaks:
    """One step under the ledger."""
    ledger = Ledger(model.device)
    ledger.hold(WEIGHTS, model.module.parameters())
    if isinstance(method, Native):
        ledger.hold(STATE, method.state())
        hooks = [
            param.register_post_accumulate_grad_hook(lambda param: ledger.mark(GRADIENTS, param.grad))
            for param in model.module.parameters()
        ]
    else:
        hooks = []
        _watch_sink(method, ledger)
    with ledger:
        method.step(batch)
    for hook in hooks:
        hook.remove()
    return ledger.peaks()


def _watch_sink(method: Any, ledger: Ledger) -> None:
    """Marks every gradient that is passed to a method that is its own sink."""
    receive = method.gradient

    def gradient(tensor: Any, w: torch.Tensor, grad: torch.Tensor) -> None:
        ledger.mark(GRADIENTS, grad)
        receive(tensor, w, grad)

    method.gradient = gradient
    state = [x for x in method.state_dict().values() if isinstance(x, torch.Tensor)]
    ledger.hold(STATE, state)


def floors(trial: Trial, model: keyhole.Model, tokens: int) -> Bytes:
    """The floors by the formulas above; a part without a floor is left out."""
    layout, b = model.layout, model.dtype.itemsize
    numel = sum(t.shape.numel() for t in layout.tensors)
    found = {WEIGHTS: b * numel}
    if trial.system == NATIVE:
        optimizer, master = trial.options["optimizer"], trial.options.get("master", False)
        found[GRADIENTS] = b * numel
        if optimizer in MOMENTS:
            moments = MOMENTS[optimizer]
            count = COUNT_BYTES * len(layout.tensors) if moments else 0
            found[STATE] = numel * (4 + 4 * moments if master else b * moments) + count
        checkpointing = trial.options.get("checkpointing", True)
    else:
        found |= {GRADIENTS: b * max(t.shape.numel() for u in layout.of_kind("block") for t in u.tensors), STATE: 0}
        checkpointing = trial.options.get("activations", "block") == "block"
    if checkpointing:
        found[ACTIVATIONS] = b * layout.block_count * tokens * model.config.hidden_size
    return found


if __name__ == "__main__":
    sys.exit(serve(MemoryWorker, Trial))
