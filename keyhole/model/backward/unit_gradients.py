"""One buffer for the gradients of a block, between the reverse sweep and a sink.

A sink is offered the gradient of each linear layer as factors (recompute.py) and usually computes the product in a
buffer that the next layer reuses. A CUDA graph (recorded.py) must write to fixed addresses, and must not change
weights. So for small blocks UnitGradients stands between the two:

    linear      product <- dy^T x, in the block's buffer; products of further micro-batches are added, as in autograd
    finished    the sink gets these gradients, complete, in the order in which they came

If a sink's updates are kernels at fixed addresses, with their numbers (rate, step) on the device, they are captured as
well: one launch for all matrices of a unit, one for all vectors.

Bytes: one block's gradients, at most FREE_SHARE of the free memory. With a budget the buffer is used if COPIES of it
are left beside the planned step (model/spare_memory.py): while a backward pass is captured there are two copies more,
to compare and to restore. The sink computes the same numbers either way, so this choice may depend on memory.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from keyhole.model.backward.sink import NOTHING, Found, RecordableSink, Sink, SinkPolicy
from keyhole.model.model import Model
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.layout import FlatTensor, Layout, Unit

FREE_SHARE = 1 / 16
COPIES = 4


class Updates(Protocol):
    """What records updates (recorded.py)."""

    spare: SpareMemory

    def update(self, depends_on: Hashable, run: Callable[[], None]) -> bool: ...

    def is_static(self, tensor: torch.Tensor) -> bool: ...


def block_bytes(layout: Layout, itemsize: int) -> int:
    """Bytes of the gradients of the largest block; 0 without blocks."""
    sizes: dict[int | None, int] = {}
    for unit in layout.of_kind("block"):
        sizes[unit.block] = sizes.get(unit.block, 0) + unit.numel * itemsize
    return max(sizes.values(), default=0)


def has_room(model: Model, spare: SpareMemory) -> bool:
    """Whether the gradients of a block fit in memory."""
    needed = block_bytes(model.layout, model.dtype.itemsize)
    if model.device.type != "cuda" or needed == 0:
        return False
    if spare.budget_bytes is not None:
        return spare.covers() and spare.has(COPIES * needed)
    return needed <= spare.left() * FREE_SHARE


class UnitGradients(RecordableSink):
    """A sink in front of another sink. The buffer holds one block: finish it before the next."""

    policy = SinkPolicy(accumulates=True)

    def __init__(self, layout: Layout, dtype: torch.dtype, recorded: Updates) -> None:
        self.recorded = recorded
        numel = block_bytes(layout, dtype.itemsize) // dtype.itemsize
        trains = any(tensor.param.requires_grad for tensor in layout.tensors)
        self.buffer = torch.zeros(numel if trains else 0, dtype=dtype, device=recorded.spare.device)  # no nan: compared
        recorded.spare.held["gradients"] = self.buffer.nbytes
        begins: dict[int | None, int] = {}
        for unit in reversed(layout.of_kind("block")):
            begins[unit.block] = unit.start
        self.begin_of = {t.start: t.start - begins[u.block] for u in layout.of_kind("block") for t in u.tensors}
        self.received: dict[str, tuple[FlatTensor, torch.Tensor]] = {}  # tensors of the current block, their weights
        self.sink: Sink = NOTHING  # unless a backward pass is running

    def in_front_of(self, sink: Sink) -> "UnitGradients":
        """Sets the sink that receives the gradients from now on."""
        self.sink = sink
        self.received.clear()
        return self

    def leave(self) -> None:
        """The backward pass is over: drops the sink, which holds a reference to the Reverse."""
        self.received.clear()
        self.sink = NOTHING

    def view(self, tensor: FlatTensor) -> torch.Tensor:
        """The tensor's place in the buffer."""
        begin = self.begin_of[tensor.start]
        return self.buffer[begin : begin + tensor.shape.numel()].view(tensor.shape)

    # -- RecordableSink --------------------------------------------------------------------------------------------

    def state(self, units: list[Unit]) -> Hashable:
        """Whether the next products overwrite or add."""
        return tuple(self.received)

    def memory(self, units: list[Unit]) -> list[torch.Tensor]:
        return [self.buffer]

    def mark(self) -> dict[str, tuple[FlatTensor, torch.Tensor]]:
        return dict(self.received)

    def rewind(self, mark: dict[str, tuple[FlatTensor, torch.Tensor]]) -> None:  # type: ignore[override]
        self.received = dict(mark)

    def replayed(self, offers: list[tuple[FlatTensor, torch.Tensor]]) -> None:
        self.received |= {tensor.name: (tensor, w) for tensor, w in offers}

    # -- Sink ------------------------------------------------------------------------------------------------------

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Computes the product in its place in the buffer."""
        if tensor.start not in self.begin_of:
            return False
        if tensor.name in self.received:
            self.view(tensor).add_(torch.mm(dy_MO.t(), x_MI))
        else:
            torch.mm(dy_MO.t(), x_MI, out=self.view(tensor))
            self.received[tensor.name] = (tensor, w_OI)
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Passes a gradient that is no product of a linear layer on at once; adds such a product if there is one."""
        if self.received.pop(tensor.name, None) is not None:
            grad = grad + self.view(tensor)
        self.sink.gradient(tensor, w, grad)

    def gradients_together(self, found: list[Found]) -> None:
        """Passes on gradients of a unit; the updates from those at fixed addresses are one launch, if possible."""
        key = self.sink.update_key
        fixed = [] if key is None else [one for one in found if self._is_fixed(one[2])]
        where = tuple([(tensor.start, w.data_ptr(), grad.data_ptr()) for tensor, w, grad in fixed])
        if fixed and self.recorded.update((where, key), lambda: self.sink.gradients_together(fixed)):
            self.sink.updated([tensor for tensor, _, _ in fixed])
        if others := found if key is None else [one for one in found if not self._is_fixed(one[2])]:
            self.sink.gradients_together(others)

    def _is_fixed(self, grad: torch.Tensor) -> bool:
        return grad._base is self.buffer or self.recorded.is_static(grad)

    def finished(self, unit: Unit) -> bool:
        """Hands over the gradients received for the unit."""
        inside = [one for one in self.received.values() if unit.start <= one[0].start < unit.stop]
        for tensor, _ in inside:
            del self.received[tensor.name]
        self.gradients_together([(tensor, w, self.view(tensor)) for tensor, w in inside])
        return self.sink.finished(unit)
