"""The interface through which a method receives gradients from the reverse sweep (reverse.py), and how they get there.

A FlatTensor identifies a tensor. A table that is visited in chunks of rows is handed over chunk by chunk, each as a
tensor of its own: `name[first:last]`, with the element index at which it starts. A gradient arrives in one of three
ways, and is handed over once, when it is complete (`HandOver`):

    offer          a linear layer offers the factors (dy, x) of its gradient (recompute.py). The sink may take them if
                   they are the whole gradient (the block and the weight are used once in the step), or if it sums
                   products itself
    offer_at       the same from a compiled block, which knows its weights by their addresses (recompute.py)
    accumulated    autograd has added to param.grad: handed over after the last visit of the block

The sink gets the weights as they are stored at home, which may have another dtype than those that the block computes
with.

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

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.model.backward.memory import block_bytes
from keyhole.model.recorder import Recorder
from keyhole.model.structure.layout import FlatTensor, Layout, Unit
from keyhole.model.weights.homes import view

Found = tuple[FlatTensor, torch.Tensor, torch.Tensor]  # (tensor, its weights, its gradient)


class Sink:
    """Receives every gradient once. w is the tensor as it is stored at home; it is on the device during the call. This
    one is for a model whose own weights are all frozen: it receives nothing and changes nothing."""

    # It is offered every product dy^T x of a linear layer, one per micro-batch and use of the weight, and sums them
    # itself; else only products that are the complete gradient.
    accumulates = False
    by_factors = False  # It takes products of linear layers as (dy, x), never as a tensor.
    # Each matrix of a large stack of experts is handed over as a tensor of its own (experts.py); else a stack is one
    # tensor.
    by_expert = False

    @property
    def update_key(self) -> Hashable | None:
        """What the launches of `gradient` depend on besides addresses, if they are our own kernels at fixed addresses
        and all values that change from step to step are on the device; they may then be captured as a CUDA graph
        (`UnitGradients`). None: they may not."""
        return None

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Offers a gradient dy^T x as its factors. True: accepted. w may be changed, since dx has been computed."""
        return False

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Hands over a complete gradient. w may be changed."""
        raise AssertionError(f"{tensor.name} is frozen and has a gradient")

    def gradients_together(self, found: list[Found]) -> None:
        """Hands over several complete gradients of one unit."""
        for one in found:
            self.gradient(*one)

    def finished(self, unit: Unit) -> bool:
        """All gradients of the unit were handed over. True: its weights have changed, and must be written back."""
        return False

    def unmet(self, tensor: FlatTensor) -> bool:
        """No token was routed to this expert: its gradient is zero. True: the sink needs nothing more; False: it needs
        `gradient` all the same."""
        return True

    def updated(self, tensors: list[FlatTensor]) -> None:
        """A graph replay has done on the device what `gradient` does with these tensors."""


class RecordableSink(Sink):
    """A sink whose `linear` only writes to memory of its own, at fixed addresses, and notes in `received` what it has
    accepted: it may be captured together with the backward pass of a block (recorded.py). units: those of the block."""

    def __init__(self) -> None:
        self.received: dict[str, tuple[FlatTensor, torch.Tensor]] = {}  # by name, with their weights

    @abstractmethod
    def state(self, units: list[Unit]) -> Hashable | None:
        """A key on which the launches of the next offers depend. None: they must not be captured now."""

    @abstractmethod
    def memory(self, units: list[Unit]) -> list[torch.Tensor]:
        """The tensors that offers write to."""


def chunk(unit: Unit) -> FlatTensor:
    """The rows of a table that a unit holds, as a FlatTensor of their own."""
    tensor = unit.tensors[0]
    first, last = unit.rows or (0, tensor.shape[0])
    if (first, last) == (0, tensor.shape[0]):
        return tensor
    shape = torch.Size((last - first, tensor.shape[1]))
    return replace(tensor, name=f"{tensor.name}[{first}:{last}]", start=unit.start, shape=shape)


def tensors_of(unit: Unit) -> list[FlatTensor]:
    """The tensors of a unit as their gradients are handed over: rows of a table, an expert's matrix."""
    if unit.expert is not None:
        return [unit.tensors[0].expert(unit.expert)]
    return unit.tensors if unit.rows is None else [chunk(unit)]


def runs_of(tensors: list[FlatTensor]) -> list[list[FlatTensor]]:
    """The tensors in order, those that are adjacent together."""
    runs: list[list[FlatTensor]] = []
    for tensor in sorted(tensors, key=lambda one: one.start):
        if runs and runs[-1][-1].stop == tensor.start:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


NOTHING = Sink()


class HandOver:
    """Hands gradients to the sink of the backward pass that is running."""

    def __init__(self, layout: Layout) -> None:
        self.sink = NOTHING  # unless a backward pass is running
        self.offers: list[FlatTensor] | None = None  # products that the sink accepts are noted here, if it is a list
        self.is_final = False  # after this visit param.grad holds the complete gradient
        self.visited_once = False  # the current block is visited once: a product that it offers is complete
        self.stored: dict[int, torch.Tensor] = {}  # id(param) -> its weights as stored, for the current block
        self.count = 0  # gradients handed over as tensors, in this backward pass
        self._params: list[nn.Parameter] = []  # of the current block
        self._param_at: dict[int, nn.Parameter] = {}  # address of its compute copy -> parameter, once it is asked for
        self.tensors = {id(t.param): t for t in layout.tensors}
        self._chunks: dict[int, list[Unit]] = {}  # id(param) -> the units that hold its rows, if it is cut into them
        for unit in layout.units:
            if unit.rows is not None:
                self._chunks.setdefault(id(unit.tensors[0].param), []).append(unit)

    def begin(self, sink: Sink, whole: bool = False) -> None:
        """A backward pass begins. whole: through the whole model, whose gradients are complete as they come."""
        self.sink, self.count, self.is_final = sink, 0, whole
        if whole:
            self.stored = {id(t.param): t.param.data for t in self.tensors.values()}

    def end(self) -> None:
        """The step is over, also after an error."""
        self.sink, self.offers = NOTHING, None
        self.is_final = self.visited_once = False
        self.leave_block()

    def enter_unit(self, unit: Unit, stored: torch.Tensor, views: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """A unit of the current block is bound. stored: its weights as stored, which parameters may point to; views: as
        they are bound, the unit's last."""
        for tensor, (param, at) in zip(unit.tensors, views[-len(unit.tensors) :], strict=True):
            self.stored[id(param)] = at if at.dtype == stored.dtype else view(stored, tensor, unit.start)
            self._params.append(param)

    def leave_block(self) -> None:
        """The units of the current block are released."""
        self.stored.clear()
        self._params.clear()
        self._param_at.clear()

    @torch.no_grad()
    def offer(self, weight: nn.Parameter, dy_MO: torch.Tensor, x_MI: torch.Tensor, used_once: bool) -> bool:
        """Whether the sink has taken the product. used_once: the block uses the weight once."""
        wanted = (self.visited_once and used_once) or self.sink.accumulates
        if not wanted or id(weight) not in self.stored:
            return False
        tensor = self.tensors[id(weight)]
        accepted = self.sink.linear(tensor, self.stored[id(weight)], dy_MO, x_MI)
        if accepted and self.offers is not None:
            self.offers.append(tensor)
        return accepted

    def offer_at(self, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> None:
        """Like `offer`, for a compiled block, which identifies its weights by their addresses and offers each once."""
        address, sums = w_OI.data_ptr(), self.sink.accumulates
        if self._params:
            self._param_at = {param.data_ptr(): param for param in self._params}
            self._params = []
        param = self._param_at.get(address) if sums else self._param_at.pop(address, None)
        if param is None or not (sums or self.visited_once):
            raise UserError(
                "compile: this model uses a weight twice in one pass, or a part or a copy of it; set compile=false"
            )
        assert self.offer(param, dy_MO, x_MI, True), "a sink cannot decline what a compiled block offers"

    @torch.no_grad()
    def accumulated(self, param: nn.Parameter) -> None:
        """Hook: autograd has added to param.grad (or nothing, if an offer was accepted). Hands it over if complete."""
        w = self.stored.get(id(param))
        if self.is_final and w is not None and param.grad is not None:
            grad, param.grad = param.grad, None
            self.count += 1
            for unit in self._chunks.get(id(param), ()):
                rows = slice(*unit.span)
                self.sink.gradient(chunk(unit), w[rows], grad[rows])
            if id(param) not in self._chunks:
                self.sink.gradient(self.tensors[id(param)], w, grad)


class UnitGradients(RecordableSink):
    """A sink in front of another sink. The buffer holds one block: finish it before the next."""

    accumulates = True

    def __init__(self, layout: Layout, dtype: torch.dtype, recorded: Recorder) -> None:
        super().__init__()
        self.recorded, blocks = recorded, layout.of_kind("block")
        begins = {unit.block: unit.start for unit in reversed(blocks)}
        self.begin_of = {t.start: t.start - begins[unit.block] for unit in blocks for t in unit.tensors}
        self.views: dict[int, torch.Tensor] = {}
        trains = any(tensor.param.requires_grad for tensor in layout.tensors)
        numel = block_bytes(layout, itemsize=1) if trains else 0
        self.buffer = torch.zeros(numel, dtype=dtype, device=recorded.spare.device)  # no nan: compared
        recorded.spare.held["gradients"] = self.buffer.nbytes
        self.sink: Sink = NOTHING  # unless a backward pass is running

    def in_front_of(self, sink: Sink) -> "UnitGradients":
        """Sets the sink that receives the gradients from now on: none, after a backward pass."""
        self.sink = sink
        self.received.clear()
        return self

    def view(self, tensor: FlatTensor) -> torch.Tensor:
        """The tensor's place in the buffer."""
        if tensor.start not in self.views:
            begin = self.begin_of[tensor.start]
            self.views[tensor.start] = self.buffer[begin : begin + tensor.shape.numel()].view(tensor.shape)
        return self.views[tensor.start]

    def state(self, units: list[Unit]) -> Hashable:
        """Whether the next products overwrite or add."""
        return tuple(self.received)

    def memory(self, units: list[Unit]) -> list[torch.Tensor]:
        return [self.buffer]

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
        own, at = self.buffer, self.recorded.fixed
        fixed = [] if key is None else [one for one in found if one[2]._base is own or one[2].data_ptr() in at]
        where = tuple([(tensor.start, w.data_ptr(), grad.data_ptr()) for tensor, w, grad in fixed])
        if fixed and self.recorded.update((where, key), lambda: self.sink.gradients_together(fixed)):
            self.sink.updated([tensor for tensor, _, _ in fixed])
        starts = {tensor.start for tensor, _, _ in fixed}
        if others := [one for one in found if one[0].start not in starts]:
            self.sink.gradients_together(others)

    def finished(self, unit: Unit) -> bool:
        """Hands over the gradients received for the unit."""
        inside = [one for one in self.received.values() if unit.start <= one[0].start < unit.stop]
        for tensor, _ in inside:
            del self.received[tensor.name]
        self.gradients_together([(tensor, w, self.view(tensor)) for tensor, w in inside])
        return self.sink.finished(unit)
