"""`keyhole bench memory`: the memory of one step at its peak: weights, gradients, optimizer state, activations.

The first step creates the optimizer's state and the libraries' workspaces; the second runs under the ledger, a dispatch
mode, which sees every tensor that an operation returns. It records when the tensor's memory was allocated and freed, on
any device; an allocation that many views share counts once. `mark` tells it what memory is for, also memory from before
the step. The purpose is known only after the allocation: a gradient is recognised when it is passed on. So the parts
are summed up at the end, from the whole record:

    part(t) = bytes of that part that are alive after event t           own peak   max over t
    total(t) = sum of the parts                                         peak       max over t, and the parts at that t

Memory that was not marked counts as activations: tensors that the forward keeps for the backward, and temporaries of
the operations. The ledger does not see memory that a kernel allocates and frees internally (cuBLAS's workspace), nor
the allocator's rounding; on a GPU the allocator's own peak is reported beside it, and the difference is these two.

The floor of each part follows from the shapes, for N parameters of b bytes, L blocks, M tokens, width H:

    weights       b N
    gradients     torch: b N, all of them at the end of the backward. A method that consumes each gradient at once: that
                  of the largest matrix
    state         torch's SGD 0, AdamW 2 b N and a count of 4 bytes per tensor; in fp32 beside 16-bit weights 4 N, 12 N
    activations   with checkpointing: b L M H, the inputs of the blocks; without, or in host memory: no floor
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import keyhole
from keyhole.bench import measure
from keyhole.bench.baselines import Native
from keyhole.bench.cases import NATIVE, Case
from keyhole.bench.process import Emit, Job
from keyhole.bench.report import Cells, Record, Report, number, table
from keyhole.bench.steps import batches_of, load, method_of
from keyhole.machine.sizes import GIB, MIB
from keyhole.methods.base import Method
from keyhole.methods.lomo.method import LOMO
from keyhole.model.structure.layout import FlatTensor

WEIGHTS, GRADIENTS, STATE, ACTIVATIONS = PARTS = ("weights", "gradients", "state", "activations")
Bytes = dict[str, int]
MOMENTS = {"SGD": 0, "AdamW": 2}  # tensors of state per parameter
COUNT_BYTES = 4  # AdamW's step count, per tensor
NOTES = """\
Each part is shown at its own peak, with its floor in brackets: what the shapes alone demand. "sum" adds these peaks, as
LOMO's Table 1 does; "peak" is the most that was held at one instant, which is less where gradients grow while
activations are freed. "vs floor": the peak over the sum of the floors, where all parts have one. "allocator": the peak
of PyTorch's allocator in the same step, with kernels' workspaces and its rounding. "largest part": of the peak.
Activations are whatever is not one of the other three: what is kept for the backward, logits, one block that runs
again."""


class Ledger(TorchDispatchMode):
    """`with Ledger(device) as ledger: step()`. Only memory of that type of device is counted."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.type
        self.events: list[tuple[int, int]] = []  # an allocation, and its bytes: negative when it was freed
        self.before: list[tuple[int, int]] = []  # allocations from before the step
        self.part_of: dict[int, str] = {}
        self.pieces: dict[int, int] = {}  # address of a live storage -> its allocation
        self.count = 0

    def mark(self, part: str, *tensors: torch.Tensor) -> None:
        """Assigns the memory of these tensors to a part, from its allocation on."""
        for tensor in tensors:
            if tensor.device.type == self.device:
                self.part_of[self._piece(tensor, self.before)] = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = None
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                if known is None:  # an in-place operation, or a view of memory from before the step
                    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
                    known = {x.untyped_storage()._cdata for x in inputs}
                if tensor.untyped_storage()._cdata not in known:
                    self._piece(tensor, self.events)
        return found

    def _piece(self, tensor: torch.Tensor, events: list[tuple[int, int]]) -> int:
        """The number of the tensor's allocation, recorded as new if it is unknown."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.pieces:
            self.count += 1
            self.pieces[storage._cdata] = self.count
            events.append((self.count, storage.nbytes()))
            weakref.finalize(storage, self._freed, storage._cdata, self.count, storage.nbytes()).atexit = False
        return self.pieces[storage._cdata]

    def _freed(self, address: int, piece: int, size: int) -> None:
        if self.pieces.get(address) == piece:
            del self.pieces[address]
        self.events.append((piece, -size))

    def peaks(self) -> tuple[Bytes, Bytes]:
        """After the step: the peak of each part by itself, and all parts at the peak of their sum."""
        now, own = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
        at_peak = dict(now)
        for piece, size in [*self.before, *self.events]:
            part = self.part_of.get(piece, ACTIVATIONS)
            now[part] += size
            own[part] = max(own[part], now[part])
            if sum(now.values()) > sum(at_peak.values()):
                at_peak = dict(now)
        return own, at_peak


def measure_memory(case: Case, job: Job, emit: Emit) -> Record:
    device = measure.device_of(job.device)
    model = load(case, job.device, job.quick, graphs=False)  # the ledger cannot see graphs
    method = method_of(case, model)
    (batch,) = batches_of(case, job.quick, model.config.vocab_size)
    method.step(batch)
    measure.clean_up(device)
    own, at_peak = peaks_of(method, model, batch)
    found = {
        "tokens": batch["input_ids"].numel(),
        "own": own,
        "at_peak": at_peak,
        "floor": floors(case, model, batch["input_ids"].numel()),
        "device": measure.device_memory(device),
        "decided": model.describe() + (method.describe() if isinstance(method, Method) else []),
    }
    model.close()
    return found


def peaks_of(method: Any, model: keyhole.Model, batch: dict[str, torch.Tensor]) -> tuple[Bytes, Bytes]:
    """The peaks of one step. method: a method or a baseline."""
    ledger, params = Ledger(model.device), list(model.module.parameters())
    ledger.mark(WEIGHTS, *params)
    hooks = []
    if isinstance(method, Native):
        ledger.mark(STATE, *method.state())
        hooks = [param.register_post_accumulate_grad_hook(lambda p: ledger.mark(GRADIENTS, p.grad)) for param in params]
    else:
        ledger.mark(STATE, *(x for x in method.state_dict().values() if isinstance(x, torch.Tensor)))
    if isinstance(method, LOMO):
        receive = method.update.gradient

        def gradient(tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
            ledger.mark(GRADIENTS, grad)
            receive(tensor, w, grad)

        method.update.gradient = gradient  # type: ignore[method-assign]
    with ledger:
        method.step(batch)
    for hook in hooks:
        hook.remove()
    return ledger.peaks()


def floors(case: Case, model: keyhole.Model, tokens: int) -> Bytes:
    """The floors by the formulas above; a part without a floor is left out."""
    layout, b = model.layout, model.dtype.itemsize
    numel = sum(t.shape.numel() for t in layout.tensors)
    found = {WEIGHTS: b * numel}
    if case.system == NATIVE:
        optimizer, master = case.options["optimizer"], case.options.get("master", False)
        found[GRADIENTS] = b * numel
        if (moments := MOMENTS.get(optimizer)) is not None:
            counts = COUNT_BYTES * len(layout.tensors) * (moments > 0)
            found[STATE] = numel * (4 + 4 * moments if master else b * moments) + counts
        checkpointing = case.options.get("checkpointing", True)
    else:
        found |= {GRADIENTS: b * max(t.shape.numel() for u in layout.of_kind("block") for t in u.tensors), STATE: 0}
        checkpointing = case.options.get("activations", "block") == "block"
    if checkpointing:
        found[ACTIVATIONS] = b * layout.block_count * tokens * model.config.hidden_size
    return found


class MemoryReport(Report):
    def sections(self) -> list[str]:
        found = self.ok()
        names = [case.name for table in self.tables.values() for case in table.cases]
        return [NOTES, table([self.cells(found[name]) for name in names if name in found])]

    def cells(self, r: Record) -> Cells:
        unit, unit_bytes = ("MiB", MIB) if self.quick else ("GiB", GIB)

        def size(count: int) -> str:
            return f"{count / unit_bytes:.2f}"

        own, floor, peak = r["own"], r["floor"], sum(r["at_peak"].values())
        whole = sum(floor.values()) if len(floor) == len(PARTS) else 0
        part = max(r["at_peak"], key=r["at_peak"].get)
        found = {"trial": str(r["name"]), "tokens": str(r["tokens"])}
        found |= {
            f"{each} {unit}": size(own[each]) + (f" ({size(floor[each])})" if each in floor else "") for each in PARTS
        }
        return found | {
            "sum": size(sum(own.values())),
            "peak": size(peak),
            "vs floor": number(peak / whole if whole else None, unit="x"),
            "allocator": size(r["device"]["allocated_bytes"]) if r["device"]["allocated_bytes"] else "",
            "largest part": f"{part}, {r['at_peak'][part] / peak:.0%}",
        }
