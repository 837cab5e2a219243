"""One buffer for the gradients of a block, between the reverse sweep and a sink.

A sink is offered the gradient of each linear layer as factors (recompute.py) and usually computes the product in a
buffer that the next layer reuses. A CUDA graph (recorded.py) must write to fixed addresses, and must not change
weights. So for small blocks UnitGradients stands between the two:

    linear      product <- dy^T x, in the block's buffer; products of further micro-batches are added, as in autograd
    finished    the sink gets each of these gradients, complete, in the order in which they came; or adjacent ones
                together

If a sink's updates are kernels at fixed addresses, with their numbers (rate, step) on the device, they are captured as
well: one launch for all matrices of a unit.

Bytes: one block's gradients, at most FREE_SHARE of the free memory. With a budget the buffer is used if COPIES of it
are left beside the planned step (model/spare_memory.py): while a backward pass is captured there are two copies more,
to compare and to restore. The sink computes the same numbers either way, so this choice may depend on memory.
"""

from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import torch

from keyhole.model.backward.recorded import RecordedBlocks
from keyhole.model.backward.sink import Sink
from keyhole.model.model import Model
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.layout import FlatTensor, Layout, Unit

FREE_SHARE = 1 / 16
COPIES = 4


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


@runtime_checkable
class TakesRuns(Protocol):
    """A sink that can use the gradients of adjacent tensors at once: one copy to the host instead of several."""

    def run_of_gradients(self, tensors: list[FlatTensor], grads: list[torch.Tensor], together: torch.Tensor) -> None:
        """together: a copy of all of them, one after the other as in their unit, which the sink may keep."""


def runs_of(tensors: list[FlatTensor]) -> list[list[FlatTensor]]:
    """The tensors in order, those that are adjacent together."""
    runs: list[list[FlatTensor]] = []
    for tensor in sorted(tensors, key=lambda one: one.start):
        if runs and runs[-1][-1].stop == tensor.start:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


class UnitGradients:
    """A sink in front of another sink. The buffer holds one block: finish it before the next."""

    accumulates, by_expert = True, False

    def __init__(self, layout: Layout, dtype: torch.dtype, recorded: RecordedBlocks) -> None:
        self.recorded = recorded
        numel = block_bytes(layout, dtype.itemsize) // dtype.itemsize
        trains = any(tensor.param.requires_grad for tensor in layout.tensors)
        self.buffer = torch.zeros(numel if trains else 0, dtype=dtype, device=recorded.device)  # compared later: no nan
        recorded.spare.held["gradients"] = self.buffer.nbytes
        begins: dict[int | None, int] = {}
        for unit in reversed(layout.of_kind("block")):
            begins[unit.block] = unit.start
        self.begin_of = {t.start: t.start - begins[u.block] for u in layout.of_kind("block") for t in u.tensors}
        self.received: dict[str, tuple[FlatTensor, torch.Tensor]] = {}  # tensors of the current block, their weights
        self.sink: Sink  # set during a backward pass

    @property
    def surveys(self) -> int:
        return self.sink.surveys

    def in_front_of(self, sink: Sink) -> "UnitGradients":
        """Sets the sink that receives the gradients from now on."""
        self.sink, self.hands_over_runs = sink, isinstance(sink, TakesRuns)
        self.received.clear()
        return self

    def leave(self) -> None:
        """The backward pass is over: drops the sink, which holds a reference to the Reverse."""
        self.received.clear()
        self.__dict__.pop("sink", None)

    def view(self, tensor: FlatTensor) -> torch.Tensor:
        """The tensor's place in the buffer."""
        begin = self.begin_of[tensor.start]
        return self.buffer[begin : begin + tensor.shape.numel()].view(tensor.shape)

    # -- Recordable (sink.py) --------------------------------------------------------------------------------------

    def state(self, units: list[Unit]) -> Hashable:
        """Whether the next products overwrite or add."""
        return tuple(self.received)

    def memory(self, units: list[Unit]) -> list[torch.Tensor]:
        return [self.buffer]

    def mark(self) -> dict[str, tuple[FlatTensor, torch.Tensor]]:
        return dict(self.received)

    def rewind(self, mark: dict[str, tuple[FlatTensor, torch.Tensor]]) -> None:
        self.received = dict(mark)

    def replayed(self, offers: list[tuple[FlatTensor, torch.Tensor]]) -> None:
        for tensor, w in offers:
            self.received[tensor.name] = (tensor, w)

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

    def survey(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, turn: int) -> None:
        self.sink.survey(tensor, w, grad, turn)

    def finished(self, unit: Unit) -> bool:
        """Hands over the gradients received for the unit."""
        inside = [one for one in self.received.values() if unit.start <= one[0].start < unit.stop]
        for tensor, _ in inside:
            del self.received[tensor.name]

        def hand_over() -> None:
            if self.hands_over_runs:
                takes_runs: Any = self.sink
                for run in runs_of([tensor for tensor, _ in inside]):
                    begin = self.begin_of[run[0].start]
                    together = self.buffer[begin : begin + run[-1].stop - run[0].start].clone()
                    takes_runs.run_of_gradients(run, [self.view(tensor) for tensor in run], together)
                return
            for tensor, w in inside:
                self.sink.gradient(tensor, w, self.view(tensor))

        how = self.sink.update_key
        if inside and how is not None:
            where = tuple((tensor.start, w.data_ptr()) for tensor, w in inside)
            if self.recorded.update((unit.index, where, how), hand_over):
                self.sink.updated([tensor for tensor, _ in inside])
        else:
            hand_over()
        return self.sink.finished(unit)
