"""Gradients of a whole model, one block at a time, and nobody keeps them.

    forward    units come by in order, all micro-batches run through each; block inputs are kept (tape.py)
    head       logits in chunks of the vocabulary: once for the loss, once more for gradients (vocabulary.py)
    reverse    units come by in reverse; a block is run again, differentiated for every micro-batch, and its gradients
               are handed to a *sink*, whole, before the next block is looked at
    table      the input embedding last: its gradient is a few rows, spread into one chunk of the table at a time
    spine      norms and other small things, used all over, at the very end

So at any time the gradients of at most one block exist, and with one micro-batch and fused linear layers (recompute.py) of
at most one matrix.

Over the link: each block up twice, and down once if the sink changed it. Clipping by the exact global norm adds
one more reverse, which changes nothing: up three times.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.model.backward.activation_store import Keeper
from keyhole.model.backward.compiled import Compiled
from keyhole.model.backward.compiled_linear import taken_by
from keyhole.model.backward.recompute import Again
from keyhole.model.backward.sink import Sink, chunk
from keyhole.model.backward.tape import Tape
from keyhole.model.backward.vocabulary import Ends
from keyhole.model.batch import DeviceBatch
from keyhole.model.forward.binding import rows_view
from keyhole.model.model import Model
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import Unit
from keyhole.model.weights.format import PACKED
from keyhole.model.weights.homes import view
from keyhole.weak import weakly


class Reverse:
    """Forward and reverse of the micro-batches of one step; see the top of this file."""

    def __init__(self, model: Model, *, keep: str = "block", fused: bool = True, compiled: bool | str = False) -> None:
        if any(home.dtype == PACKED for home in model.engine.homes):
            raise UserError("wire: fp8 weights have no gradient to add up in; use bf16, fp16 or fp32")
        if keep == "none" and model.engine.streamed:
            raise UserError("activations: none keeps graphs that need all weights on the device; use block or host")
        if model.device.type == "cuda":  # activations of many sizes come and go: pieces that fit nothing add up
            _expandable_segments()
        self.model, self.layout, self.keep = model, model.layout, keep
        self.blocks = find_blocks(model.module)
        self.fused = fused
        self.compiled = Compiled(compiled if isinstance(compiled, str) else "inductor") if compiled else None
        self.again = [Again(block) for block in self.blocks] if fused and keep != "none" and not compiled else None
        self.keeper = Keeper(model.device, to_host=keep == "host")
        self.units_of = {i: [u for u in self.layout.of_kind("block") if u.block == i] for i in range(len(self.blocks))}
        self.ends = Ends(model)
        self._final = self._whole = False
        self._sink: Sink | None = None
        self._stored: dict[int, torch.Tensor] = {}  # id(param) -> its weights as stored, of the block at work
        self._at: dict[int, nn.Parameter] = {}  # address of its compute copy -> parameter, likewise
        self._taken: set[int] = set()  # parameters of it that a compiled reverse has given
        self._tensor = {id(t.param): t for t in self.layout.tensors}
        for tensor in self.layout.tensors:
            if tensor.param.requires_grad:
                tensor.param.register_post_accumulate_grad_hook(weakly(self._accumulated))

    # -- forward ---------------------------------------------------------------------------------------------------

    @contextmanager
    def sweep(self, reverses: int = 1) -> Iterator[None]:
        """Everything of one step happens inside: `reverses` times through the model after the forward."""
        blocks = [u.index for u in self.layout.of_kind("block")]
        head = [u.index for u in self.layout.head_units]
        table = [u.index for u in self.layout.of_kind("table")]
        order = blocks + head + (head + blocks[::-1] + table) * reverses
        with self.model.engine.sweep(f"train with {reverses}", order):
            try:
                yield
            finally:
                self._forget()
                self.model.binding.bind_homes()

    def forward(self, batches: list[DeviceBatch]) -> torch.Tensor:
        """The mean loss over all trained tokens of all micro-batches, unread."""
        model, self.tape = self.model, Tape(self.keep, self.keeper, self.compiled)
        self.spine = model.as_compute(self.layout.spine, model.engine.homes[0])

        held: list[Unit] = []

        def let_go(next_unit: Unit | None) -> None:
            of_same = whole and next_unit is not None and held and next_unit.block == held[0].block
            if not of_same or next_unit is held[0]:  # the block again: a model may use one twice
                for unit in held:
                    model.engine.release(unit.index)
                held.clear()

        def serve(unit: Unit | None, resume: Any) -> None:
            let_go(unit)
            model.binding.bind(unit, model.clean(unit, len(held)) if unit else None, self.spine)
            held.extend([unit] if unit else [])
            for i in range(len(batches)):
                resume(i)

        whole = self.compiled is not None  # compiled code cannot stop inside a block
        if self.compiled is not None:  # one micro-batch: what a linear layer offers is its whole gradient
            self.compiled.offer = model.device if self.fused and len(batches) == 1 else None
        recording = self.tape.recording(self.blocks, lambda: model.conductor.current.index)
        with torch.enable_grad(), recording:
            self.hidden = model.lockstep(batches, serve, self.ends.rows, whole=whole)
            let_go(None)
        model.binding.bind(None, None, self.spine)
        return self.ends.loss(self.hidden, batches, self.spine)

    # -- reverse ---------------------------------------------------------------------------------------------------

    def reverse(self, sink: Sink, *, loss_scale: float = 1.0, last: bool = True) -> None:
        """Gives every gradient of loss_scale * loss to the sink, once. last: the forward may be forgotten."""
        self._sink, self.last = sink, last
        self.tape.restart()
        self.ends.restart(loss_scale)
        grads = self.ends.reverse_head(self._give_rows)
        for hidden_NH, grad_NH in zip(self.hidden, grads, strict=True):
            torch.autograd.backward(hidden_NH, grad_NH, retain_graph=not last)
        grads.clear()
        self._reverse_blocks()
        self.ends.reverse_table(self._give_rows)
        self._reverse_spine()

    def walk(self, loss: torch.Tensor, sink: Sink, last: bool = True) -> None:
        """The same for a loss that somebody computed with the module itself, all of whose weights are at home:
        autograd walks back in one go, and each gradient is given as soon as it is whole."""
        self._stored = {id(t.param): t.param.data for t in self.layout.tensors}
        self._sink, self._final = sink, True
        try:
            loss.backward(retain_graph=not last)
        finally:
            self._stored.clear()
            self._sink, self._final = None, False

    def _reverse_blocks(self) -> None:
        engine, stops = self.model.engine, self.tape.stops
        to_come = Counter(block for stop in stops for block in {visit.block for visit in stop.values()})
        for i in reversed(range(len(stops))):
            visits = list(stops[i].values())
            block = visits[0].block
            self._arrive(block)
            if i > 0:
                for visit in stops[i - 1].values():
                    visit.prefetch()
            to_come[block] -= 1
            self._whole = len(visits) == 1 and sum(v.block == block for stop in stops for v in stop.values()) == 1
            for visit in visits:
                self._final = to_come[block] == 0 and visit is visits[-1]
                with taken_by(self._take_at), nullcontext() if self.compiled is None else self.compiled.offering():
                    visit.reverse(lambda call, b=block: self._run_again(b, call), self.last)
            self._leave(block, done=to_come[block] == 0)
            if self.last:
                stops.pop()
        self._final = self._whole = False
        assert not engine.held, "a block was left behind"

    def _arrive(self, block: int) -> None:
        """Brings the block's units in and points its parameters there."""
        for place, unit in enumerate(self.units_of[block]):
            stored = self.model.engine.acquire(unit.index)
            self.model.binding.bind(unit, self.model.as_compute(unit, stored, place), self.spine)
            for tensor in unit.tensors:
                self._stored[id(tensor.param)] = view(stored, tensor, unit.start)
                self._at[tensor.param.data_ptr()] = tensor.param

    def _run_again(self, block: int, call: Any) -> Any:
        return call() if self.again is None else self.again[block].run(call, self._take)

    @torch.no_grad()
    def _take(self, weight: nn.Parameter, dy_MO: torch.Tensor, x_MI: torch.Tensor, alone: bool) -> bool:
        w = self._stored.get(id(weight))
        whole = (self._whole and alone) or getattr(self._sink, "accumulates", False)
        return whole and w is not None and self._sink.linear(self._tensor[id(weight)], w, dy_MO, x_MI)

    def _take_at(self, w: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> None:
        """The same for a compiled block, which knows its weights by their addresses."""
        param = self._at.get(w.data_ptr())
        if param is None:
            raise UserError("compile: this model computes with a part or a copy of a weight; set compile=false")
        if id(param) in self._taken or not self._whole and not getattr(self._sink, "accumulates", False):
            raise UserError("compile: this model uses a weight twice in one pass; set compile=false")
        self._taken.add(id(param))
        taken = self._sink.linear(self._tensor[id(param)], self._stored[id(param)], dy_MO, x_MI)
        assert taken, "a sink cannot decline what a compiled block offers"

    @torch.no_grad()
    def _accumulated(self, param: nn.Parameter) -> None:
        """Autograd has added to param.grad (or nothing, where it was taken); if nothing more can come, it goes."""
        if self._final and id(param) in self._stored and param.grad is not None:
            grad, param.grad = param.grad, None
            self._sink.gradient(self._tensor[id(param)], self._stored[id(param)], grad)

    def _leave(self, block: int, done: bool) -> None:
        for unit in self.units_of[block]:
            if done:
                for tensor in unit.tensors:
                    if tensor.param.grad is not None:  # nothing came from the last pass
                        self._final = True
                        self._accumulated(tensor.param)
                if self._sink.finished(unit):
                    self.model.engine.commit(unit.index)
            self.model.engine.release(unit.index)
        self._stored.clear()
        self._at.clear()
        self._taken.clear()

    @torch.no_grad()
    def _give_rows(self, unit: Unit, stored: torch.Tensor, grad_RH: torch.Tensor | None) -> None:
        """Gives a chunk of a table to the sink under a name of its own, and lets the unit go."""
        if grad_RH is not None:
            self._sink.gradient(chunk(unit), rows_view(unit, stored), grad_RH.contiguous())
            if self._sink.finished(unit):
                self.model.engine.commit(unit.index)
        self.model.engine.release(unit.index)

    @torch.no_grad()
    def _reverse_spine(self) -> None:
        home, unit = self.model.engine.homes[0], self.layout.spine
        for tensor in unit.tensors:
            if tensor.param.grad is not None:
                grad, tensor.param.grad = tensor.param.grad, None
                self._sink.gradient(tensor, view(home, tensor, unit.start), grad)
        self._sink.finished(unit)

    def _forget(self) -> None:
        """Drops graphs and gradients, also after a failure."""
        self.tape, self.hidden = None, []
        self.ends.forget()
        self._final = self._whole = False
        self._sink = None
        for tensor in self.layout.tensors:
            tensor.param.grad = None


def _expandable_segments() -> None:
    """PYTORCH_ALLOC_CONF=expandable_segments:True, from here on."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change("expandable_segments:True")
