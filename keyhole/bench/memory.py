"""`keyhole bench memory`: the memory of one step at its peak, by part (ledger.py).

The first step creates the optimizer's state and the libraries' workspaces; the second runs under the ledger. The floor
of each part follows from the shapes, for N parameters of b bytes, L blocks, M tokens, width H:

    weights       b N
    gradients     torch: b N, all of them at the end of the backward. A method that consumes each gradient at once: that
                  of the largest matrix
    state         torch's SGD 0, AdamW 2 b N and a count of 4 bytes per tensor; in fp32 beside 16-bit weights 4 N, 12 N
    activations   with checkpointing: b L M H, the inputs of the blocks; without, or in host memory: no floor
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.baselines import Native
from keyhole.bench.cases import NATIVE, Case, Table
from keyhole.bench.ledger import ACTIVATIONS, GRADIENTS, PARTS, STATE, WEIGHTS, Bytes, Ledger, Peaks
from keyhole.bench.process import Emit, Job
from keyhole.bench.report import Columns, Record, Report, number, table_of
from keyhole.bench.steps import batches_of, load, method_of
from keyhole.machine.sizes import GIB, MIB
from keyhole.methods.base import Method
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.update import Update
from keyhole.model.structure.layout import FlatTensor

MOMENTS = {"SGD": 0, "AdamW": 2}  # tensors of state per parameter
COUNT_BYTES = 4  # AdamW's step count, per tensor
NOTES = """\
Each part is shown at its own peak, with its floor in brackets: what the shapes alone demand. "sum" adds these peaks, as
LOMO's Table 1 does; "peak" is the most that was held at one instant, which is less where gradients grow while
activations are freed. "vs floor": the peak over the sum of the floors, where all parts have one. "allocator": the peak
of PyTorch's allocator in the same step, with kernels' workspaces and its rounding. "largest part": of the peak.
Activations are whatever is not one of the other three: what is kept for the backward, logits, one block that runs
again."""


def measure_memory(case: Case, job: Job, emit: Emit) -> Record:
    """Peaks and floors by part."""
    device = measure.device_of(job.device)
    model = load(case, job.device, job.quick, graphs=False)  # the ledger cannot see graphs
    method = method_of(case, model)
    (batch,) = batches_of(case, job.quick, model.config.vocab_size)
    method.step(batch)
    measure.clean_up(device)
    peaks = peaks_of(method, model, batch)
    found = {
        "tokens": batch["input_ids"].numel(),
        "own": peaks.own,
        "at_peak": peaks.at_peak,
        "floor": floors(case, model, batch["input_ids"].numel()),
        "device": measure.device_memory(device),
        "decided": model.describe() + (method.describe() if isinstance(method, Method) else []),
    }
    model.close()
    return found


def peaks_of(method: Any, model: keyhole.Model, batch: dict[str, torch.Tensor]) -> Peaks:
    """One step under the ledger."""
    ledger, hooks = Ledger(model.device), []
    ledger.hold(WEIGHTS, model.module.parameters())

    def arrived(param: torch.Tensor) -> None:
        assert param.grad is not None
        ledger.mark(GRADIENTS, param.grad)

    if isinstance(method, Native):
        ledger.hold(STATE, method.state())
        hooks = [param.register_post_accumulate_grad_hook(arrived) for param in model.module.parameters()]
    else:
        ledger.hold(STATE, [x for x in method.state_dict().values() if isinstance(x, torch.Tensor)])
    if isinstance(method, LOMO):
        _watch_sink(method.update, ledger)
    with ledger:
        method.step(batch)
    for hook in hooks:
        hook.remove()
    return ledger.peaks()


def _watch_sink(sink: Update, ledger: Ledger) -> None:
    """Marks every gradient that is passed to it."""
    receive = sink.gradient

    def gradient(tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        ledger.mark(GRADIENTS, grad)
        receive(tensor, w, grad)

    sink.gradient = gradient  # type: ignore[method-assign]


def floors(case: Case, model: keyhole.Model, tokens: int) -> Bytes:
    """The floors by the formulas above; a part without a floor is left out."""
    layout, b = model.layout, model.dtype.itemsize
    numel = sum(t.shape.numel() for t in layout.tensors)
    found = {WEIGHTS: b * numel}
    if case.system == NATIVE:
        optimizer, master = case.options["optimizer"], case.options.get("master", False)
        found[GRADIENTS] = b * numel
        if optimizer in MOMENTS:
            moments = MOMENTS[optimizer]
            count = COUNT_BYTES * len(layout.tensors) if moments else 0
            found[STATE] = numel * (4 + 4 * moments if master else b * moments) + count
        checkpointing = case.options.get("checkpointing", True)
    else:
        found |= {GRADIENTS: b * max(t.shape.numel() for u in layout.of_kind("block") for t in u.tensors), STATE: 0}
        checkpointing = case.options.get("activations", "block") == "block"
    if checkpointing:
        found[ACTIVATIONS] = b * layout.block_count * tokens * model.config.hidden_size
    return found


class MemoryReport(Report):
    """One line per case."""

    def __init__(self, out: Path, command: str, quick: bool, tables: dict[str, Table]) -> None:
        super().__init__("memory", out, command, quick)
        self.names = [case.name for table in tables.values() for case in table.cases]
        unit, self.unit_bytes = ("MiB", MIB) if quick else ("GiB", GIB)
        self.columns: Columns[Record] = {
            "trial": lambda r: str(r["name"]),
            "tokens": lambda r: str(r["tokens"]),
            **{f"{part} {unit}": partial(self.part, part) for part in PARTS},
            "sum": lambda r: self.size(sum(r["own"].values())),
            "peak": lambda r: self.size(sum(r["at_peak"].values())),
            "vs floor": self.to_floor,
            "allocator": lambda r: self.size(r["device"]["allocated_bytes"]) if r["device"]["allocated_bytes"] else "",
            "largest part": self.largest,
        }

    def sections(self) -> list[str]:
        found = self.ok()
        return [NOTES, table_of(self.columns, [found[name] for name in self.names if name in found])]

    def part(self, part: str, r: Record) -> str:
        return self.size(r["own"][part]) + (f" ({self.size(r['floor'][part])})" if part in r["floor"] else "")

    def to_floor(self, r: Record) -> str:
        whole = sum(r["floor"].values()) if len(r["floor"]) == len(PARTS) else None
        return number(sum(r["at_peak"].values()) / whole if whole else None, unit="x")

    def largest(self, r: Record) -> str:
        part = max(r["at_peak"], key=r["at_peak"].get)
        return f"{part}, {r['at_peak'][part] / sum(r['at_peak'].values()):.0%}"

    def size(self, count: int) -> str:
        return f"{count / self.unit_bytes:.2f}"
