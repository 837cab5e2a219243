"""From autograd to the sink: the gradients of the block that is being differentiated.

A gradient arrives in one of three ways, and is handed over once, when it is complete:

    offer          a linear layer offers the factors (dy, x) of its gradient (recompute.py). The sink may take them if
                   they are the whole gradient (the block and the weight are used once in the step), or if it sums
                   products itself
    offer_at       the same from a compiled block, which knows its weights by their addresses (compiled_linear.py)
    accumulated    autograd has added to param.grad: handed over after the last visit of the block

The sink gets the weights as they are stored at home, which may have another dtype than those that the block computes
with. reverse.py says which block is differentiated, and which of its visits is the last.
"""

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.model.backward.recorded import RecordedBlocks
from keyhole.model.backward.sink import Sink, chunk
from keyhole.model.structure.layout import FlatTensor, Unit


class HandOver:
    """Hands gradients to the sink of the backward pass that is running."""

    def __init__(self, tensors: list[FlatTensor]) -> None:
        self.sink: Sink = None  # type: ignore[assignment]  # None: no backward pass is running
        self.recorded: RecordedBlocks | None = None  # is told which products the sink accepts
        self.is_final = False  # after this visit param.grad holds the complete gradient
        self.visited_once = False  # the current block is visited once: a product that it offers is complete
        self.stored: dict[int, torch.Tensor] = {}  # id(param) -> its weights as stored, for the current block
        self.count = 0  # gradients handed over as tensors, in this backward pass
        self._param_at: dict[int, nn.Parameter] = {}  # address of its compute copy -> parameter
        self._offered: set[int] = set()  # parameters that a compiled backward has offered
        self._chunks: dict[int, list[Unit]] = {}  # id(param) -> the units that hold its rows, if it is cut into them
        self._tensor = {id(t.param): t for t in tensors}

    def begin(self, sink: Sink, recorded: RecordedBlocks | None) -> None:
        """A backward pass begins."""
        self.sink, self.recorded, self.count = sink, recorded, 0

    def end(self) -> None:
        """The step is over, also after an error."""
        self.sink, self.recorded = None, None  # type: ignore[assignment]
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
        if accepted and self.recorded is not None:
            self.recorded.note_offer(self._tensor[id(weight)])
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
        if self.recorded is not None:
            self.recorded.note_offer(self._tensor[id(param)])

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
