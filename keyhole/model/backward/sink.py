"""The interface through which a method receives gradients from the reverse sweep (reverse.py), and how they get there.

A FlatTensor identifies a tensor. A table that is visited in chunks of rows is handed over chunk by chunk, each as a
tensor of its own: `name[first:last]`, with the element index at which it starts. A gradient arrives in one of three
ways, and is handed over once, when it is complete (`HandOver`):

    offer          a linear layer offers the factors (dy, x) of its gradient (recompute.py). The sink may take them if
                   they are the whole gradient (the block and the weight are used once in the step), or if it sums
                   products itself
    offer_at       the same from a compiled block, which knows its weights by their addresses (compiled.py)
    accumulated    autograd has added to param.grad: handed over after the last visit of the block

The sink gets the weights as they are stored at home, which may have another dtype than those that the block computes
with.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.model.structure.layout import FlatTensor, Unit

Found = tuple[FlatTensor, torch.Tensor, torch.Tensor]
"""(tensor, its weights, its gradient)"""


@dataclass(frozen=True)
class SinkPolicy:
    """How a sink takes gradients."""

    accumulates: bool = False
    """It is offered every product dy^T x of a linear layer, one per micro-batch and use of the weight, and sums them
    itself; else only products that are the complete gradient."""
    by_factors: bool = False
    """It takes products of linear layers as (dy, x), never as a tensor."""
    by_expert: bool = False
    """Each matrix of a large stack of experts is handed over as a tensor of its own (experts.py); else a stack is one
    tensor."""


class Sink:
    """Receives every gradient once. w is the tensor as it is stored at home; it is on the device during the call. This
    one is for a model whose own weights are all frozen: it receives nothing and changes nothing."""

    policy = SinkPolicy()

    @property
    def update_key(self) -> Hashable | None:
        """What the launches of `gradient` depend on besides addresses, if they are our own kernels at fixed addresses
        and all values that change from step to step are on the device; they may then be captured as a CUDA graph
        (unit_gradients.py). None: they may not."""
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
    """A sink whose `linear` only writes to memory of its own, at fixed addresses: it may be captured together with the
    backward pass of a block (recorded.py). units: those of the block."""

    def state(self, units: list[Unit]) -> Hashable | None:
        """A key on which the launches of the next offers depend. None: they must not be captured now."""
        raise NotImplementedError

    def memory(self, units: list[Unit]) -> list[torch.Tensor]:
        """The tensors that offers write to."""
        raise NotImplementedError

    def mark(self) -> object:
        """The host-side state of the offers so far."""
        raise NotImplementedError

    def rewind(self, mark: object) -> None:
        """Restores that state: the offers since then will be made again."""
        raise NotImplementedError

    def replayed(self, offers: list[tuple[FlatTensor, torch.Tensor]]) -> None:
        """A graph replay has done on the device what `linear` does with these tensors and their weights."""
        raise NotImplementedError


def chunk(unit: Unit) -> FlatTensor:
    """The rows of a table that a unit holds, as a FlatTensor of their own."""
    tensor = unit.tensors[0]
    first, last = unit.rows or (0, tensor.shape[0])
    if (first, last) == (0, tensor.shape[0]):
        return tensor
    shape = torch.Size((last - first, tensor.shape[1]))
    return replace(tensor, name=f"{tensor.name}[{first}:{last}]", start=unit.start, shape=shape)


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


def _ignored(tensor: FlatTensor) -> None:
    """Nobody is told."""


class HandOver:
    """Hands gradients to the sink of the backward pass that is running."""

    def __init__(self, tensors: list[FlatTensor]) -> None:
        self.sink = NOTHING  # unless a backward pass is running
        self.accepted: Callable[[FlatTensor], None] = _ignored  # is told which products the sink accepts
        self.is_final = False  # after this visit param.grad holds the complete gradient
        self.visited_once = False  # the current block is visited once: a product that it offers is complete
        self.stored: dict[int, torch.Tensor] = {}  # id(param) -> its weights as stored, for the current block
        self.count = 0  # gradients handed over as tensors, in this backward pass
        self._param_at: dict[int, nn.Parameter] = {}  # address of its compute copy -> parameter
        self._offered: set[int] = set()  # parameters that a compiled backward has offered
        self._chunks: dict[int, list[Unit]] = {}  # id(param) -> the units that hold its rows, if it is cut into them
        self._tensor = {id(t.param): t for t in tensors}

    def begin(self, sink: Sink, accepted: Callable[[FlatTensor], None] | None = None) -> None:
        """A backward pass begins. accepted: is told which products the sink accepts."""
        self.sink, self.accepted, self.count = sink, accepted or _ignored, 0

    def end(self) -> None:
        """The step is over, also after an error."""
        self.sink, self.accepted = NOTHING, _ignored
        self.is_final = self.visited_once = False
        self._chunks.clear()
        self.leave_block()

    def enter_unit(self, unit: Unit, views: list[tuple[int, torch.Tensor]]) -> None:
        """A unit of the current block is bound. views: (id(param), its weights as stored)."""
        self.stored.update(views)
        for tensor in unit.tensors:
            self._param_at[tensor.param.data_ptr()] = tensor.param

    def leave_block(self) -> None:
        """The units of the current block are released."""
        self.stored.clear()
        self._param_at.clear()
        self._offered.clear()

    def cut_into_chunks(self, units: list[Unit]) -> None:
        """Tables whose rows are units are handed over in the chunks that these hold."""
        for unit in units:
            if unit.rows is not None:
                self._chunks.setdefault(id(unit.tensors[0].param), []).append(unit)

    @torch.no_grad()
    def offer(self, weight: nn.Parameter, dy_MO: torch.Tensor, x_MI: torch.Tensor, used_once: bool) -> bool:
        """Whether the sink has taken the product. used_once: the block uses the weight once."""
        w_OI = self.stored.get(id(weight))
        offered = w_OI is not None and ((self.visited_once and used_once) or self.sink.policy.accumulates)
        accepted = w_OI is not None and offered and self.sink.linear(self._tensor[id(weight)], w_OI, dy_MO, x_MI)
        if accepted:
            self.accepted(self._tensor[id(weight)])
        return accepted

    def offer_at(self, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> None:
        """Like `offer`, for a compiled block, which identifies its weights by their addresses."""
        param = self._param_at.get(w_OI.data_ptr())
        if param is None:
            raise UserError("compile: this model computes with a part or a copy of a weight; set compile=false")
        if not self.sink.policy.accumulates and (id(param) in self._offered or not self.visited_once):
            raise UserError("compile: this model uses a weight twice in one pass; set compile=false")
        self._offered.add(id(param))
        accepted = self.sink.linear(self._tensor[id(param)], self.stored[id(param)], dy_MO, x_MI)
        assert accepted, "a sink cannot decline what a compiled block offers"
        self.accepted(self._tensor[id(param)])

    @torch.no_grad()
    def accumulated(self, param: nn.Parameter) -> None:
        """Hook: autograd has added to param.grad (or nothing, if an offer was accepted). Hands it over if complete."""
        if self.is_final and id(param) in self.stored and param.grad is not None:
            grad, param.grad = param.grad, None
            self.count += 1
            for unit in self._chunks.get(id(param), ()):
                first, last = unit.span
                self.sink.gradient(chunk(unit), self.stored[id(param)][first:last], grad[first:last])
            if id(param) not in self._chunks:
                self.sink.gradient(self._tensor[id(param)], self.stored[id(param)], grad)
