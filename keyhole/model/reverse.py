"""Gradients of a whole model, one block at a time, and nobody keeps them.

    forward    units come by in order, all micro-batches run through each; block inputs are kept (tape.py)
    head       logits in chunks of the vocabulary: once for the loss, once more for gradients
    reverse    units come by in reverse; a block is run again, differentiated for every micro-batch, and its gradients
               are handed to a *sink*, whole, before the next block is looked at
    table      the input embedding last: its gradient is a few rows, spread into one chunk of the table at a time
    spine      norms and other small things, used all over, at the very end

So at any time the gradients of at most one block exist, and with one micro-batch and fused linear layers (linear.py) of
at most one matrix. A tied table gets its gradient once, at the end: the logits of its chunks are made a third time then
(2 N V H operations more), so that no gradient of the whole vocabulary is kept in between.

Over the link: each block up twice, and down once if the sink changed it. Clipping by the exact global norm adds
one more reverse, which changes nothing: up three times.
Legend: N trained tokens of a pass, H width, R rows of a chunk of the vocabulary, M all tokens of a pass.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from keyhole.errors import UserError
from keyhole.model.batch import DeviceBatch
from keyhole.model.compiled import Compiled
from keyhole.model.homes import view
from keyhole.model.kept import Keeper
from keyhole.model.layout import FlatTensor, Unit, find_blocks
from keyhole.model.linear import Again
from keyhole.model.model import Model
from keyhole.model.taken import taken_by
from keyhole.model.tape import Tape
from keyhole.offload.wire import PACKED
from keyhole.ops.loss import RunningNLL

HEAD_TOKENS = 4096  # logits exist for so many tokens at a time


class Sink(Protocol):
    """What becomes of gradients. w is the tensor as it is stored, on the device for the time of the call.

    A sink with an attribute `accumulates` that is true is offered every product dy^T x of a linear layer, one for each
    micro-batch and use of the weight, and adds them up itself; any other only those that are the whole gradient.
    """

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Offers a gradient dy^T x before it is made. True: taken. w may be changed, dx has been computed."""

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Gives a whole gradient. w may be changed."""

    def finished(self, unit: Unit) -> bool:
        """All gradients of the unit were given. True: its weights changed and must go home."""


@dataclass
class _Embedded:
    """Rows of the table that a pass looked up, as a leaf, and whose they are."""

    ids_M: torch.Tensor
    rows_MH: nn.Parameter


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
        self.padding_idx = model.embedding.padding_idx
        self._final = self._whole = False
        self._sink: Sink | None = None
        self._stored: dict[int, torch.Tensor] = {}  # id(param) -> its weights as stored, of the block at work
        self._at: dict[int, nn.Parameter] = {}  # address of its compute copy -> parameter, likewise
        self._tensor = {id(t.param): t for t in self.layout.tensors}
        for tensor in self.layout.tensors:
            if tensor.param.requires_grad:
                tensor.param.register_post_accumulate_grad_hook(_calling(weakref.WeakMethod(self._accumulated)))

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
        model, self.batches = self.model, batches
        self.tape, self.embedded = Tape(self.keep, self.keeper, self.compiled), {}
        self.spine = self._compute(self.layout.spine, model.engine.homes[0])

        def serve(unit: Unit | None, resume: Any) -> None:
            model.binding.bind(unit, model.clean(unit) if unit else None, self.spine)
            for i in range(len(batches)):
                resume(i)
            if unit:
                model.engine.release(unit.index)

        if self.compiled is not None:  # one micro-batch: what a linear layer offers is its whole gradient
            self.compiled.offer = model.device if self.fused and len(batches) == 1 else None
        recording = self.tape.recording(self.blocks, lambda: model.conductor.current.index)
        with torch.enable_grad(), recording:
            self.hidden = model.lockstep(batches, serve, self._rows)
        model.binding.bind(None, None, self.spine)
        self.token_count = max(1, sum(b.token_count for b in batches))
        return self._loss()

    def _rows(self, index: int, ids_M: torch.Tensor) -> torch.Tensor:
        rows_MH = self.model.table_rows(ids_M).to(self.model.dtype)
        if not self.layout.table.param.requires_grad:
            return rows_MH
        self.embedded[index] = _Embedded(ids_M, nn.Parameter(rows_MH))
        return self.embedded[index].rows_MH

    @torch.no_grad()
    def _loss(self) -> torch.Tensor:
        self.running = [RunningNLL(b.target_N) for b in self.batches]
        for unit in self.layout.head_units:
            self.model.binding.bind_head(unit, self.model.clean(unit), self.spine)
            for state, hidden_NH in zip(self.running, self.hidden, strict=True):
                self.model.head.add_nll(state, hidden_NH.detach(), unit.rows[0])
            self.model.engine.release(unit.index)
        return torch.stack([state.nll_N().sum() for state in self.running]).sum() / self.token_count

    # -- reverse ---------------------------------------------------------------------------------------------------

    def reverse(self, sink: Sink, *, loss_scale: float = 1.0, last: bool = True) -> None:
        """Gives every gradient of loss_scale * loss to the sink, once. last: the forward may be forgotten."""
        self._sink, self.last = sink, last
        one = torch.ones((), device=self.model.device)
        self.scale = one * loss_scale / self.token_count
        self.tape.restart()
        for embedded in self.embedded.values():
            embedded.rows_MH.grad = None
        grads = self._reverse_head()
        for hidden_NH, grad_NH in zip(self.hidden, grads, strict=True):
            torch.autograd.backward(hidden_NH, grad_NH, retain_graph=not last)
        grads.clear()
        self._reverse_blocks()
        self._reverse_table()
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

    def _reverse_head(self) -> list[torch.Tensor]:
        """Gradients of the hidden states; the rows of an untied head are given to the sink on the way."""
        units, bias = self.layout.head_units, self.model.head.linear.bias
        total: list[Any] = [None] * len(self.hidden)
        for unit in units:
            stored = self.model.engine.acquire(unit.index)
            weight = self._rows_of(unit, stored, self._compute(unit, stored))
            trained = unit.tensors[0].param.requires_grad and not self.layout.tied
            dw = db = None
            for p in range(len(self.hidden)):
                dx, dw_p, db_p = self._head_grads(unit, p, weight, wants=(True, trained, bias is not None))
                total[p] = dx if len(units) == 1 else dx.float() if total[p] is None else total[p].add_(dx)
                dw, db = _add(dw, dw_p), _add(db, db_p)
            if db is not None and bias.requires_grad:
                bias.grad = torch.zeros_like(bias) if bias.grad is None else bias.grad
                bias.grad[unit.rows[0] : unit.rows[1]] += db
            self._give_rows(unit, stored, dw)
        return [grad.to(hidden.dtype) for grad, hidden in zip(total, self.hidden, strict=True)]

    def _head_grads(self, unit: Unit, p: int, weight_RH: torch.Tensor, wants: tuple[bool, bool, bool]) -> Any:
        """Gradients of the loss of pass p by way of one chunk of logits: of hidden states, rows and bias."""
        head, first = self.model.head, unit.rows[0]
        self.model.binding.bind_head(unit, weight_RH.flatten(), self.spine)
        leaf, bias = nn.Parameter(weight_RH, requires_grad=wants[1]), head.linear.bias
        bias = None if bias is None else nn.Parameter(bias.data, requires_grad=wants[2])
        dx, dw, db = [], None, None
        parts = zip(self.hidden[p].split(HEAD_TOKENS), self.running[p].split(HEAD_TOKENS), strict=True)
        for hidden_NH, state in parts:
            x = hidden_NH.detach().requires_grad_(wants[0])
            with torch.enable_grad(), head.holding(leaf, bias):
                logits = head.logits(x)
            if len(self.layout.head_units) == 1:
                with torch.enable_grad():
                    logits = F.cross_entropy(logits.float(), state.targets_N, reduction="sum")
                grad = self.scale
            else:
                grad = state.grad_(logits.detach().clone(), first, self.scale)
            inputs = [t for t, wanted in zip((x, leaf, bias), wants, strict=True) if wanted]
            found = iter(torch.autograd.grad(logits, inputs, grad))
            if wants[0]:
                dx.append(next(found))
            dw = _add(dw, next(found)) if wants[1] else None
            db = _add(db, next(found)) if wants[2] else None
        return torch.cat(dx) if dx else None, dw, db

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
        param = self._at[w.data_ptr()]
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

    @torch.no_grad()
    def _reverse_table(self) -> None:
        if not self.layout.table.param.requires_grad:
            return
        for unit in self.layout.of_kind("table"):
            stored = self.model.engine.acquire(unit.index)
            grad = self._embedding_grad(unit)
            if self.layout.tied:
                weight_RH, head = self._rows_of(unit, stored, self._compute(unit, stored)), None
                for p in range(len(self.hidden)):
                    head = _add(head, self._head_grads(unit, p, weight_RH, wants=(False, True, False))[1])
                grad = _add(head, grad)
            self._give_rows(unit, stored, grad)

    def _embedding_grad(self, unit: Unit) -> torch.Tensor | None:
        """[R, H]: what came back for looked-up rows of this chunk, added up row by row."""
        first, end = unit.rows
        found = [e for e in self.embedded.values() if e.rows_MH.grad is not None]
        if not found:
            return None
        ids_M = torch.cat([e.ids_M for e in found]) - first
        rows_MH = torch.cat([e.rows_MH.grad for e in found])
        if self.padding_idx is not None:  # as torch's own embedding: this row is not trained by being looked up
            ids_M = torch.where(ids_M == self.padding_idx - first, end - first, ids_M)
        ids_M = torch.where((ids_M < 0) | (ids_M >= end - first), end - first, ids_M)  # not ours: one row past the end
        add_up = torch.ops.aten.embedding_dense_backward
        return add_up(rows_MH, ids_M, end - first + 1, -1, False)[: end - first]

    def _rows_of(self, unit: Unit, stored: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        row_count, width = unit.rows[1] - unit.rows[0], unit.tensors[0].shape[1]
        return flat[: row_count * width].view(row_count, width)

    @torch.no_grad()
    def _give_rows(self, unit: Unit, stored: torch.Tensor, grad_RH: torch.Tensor | None) -> None:
        """Gives a chunk of a table to the sink under a name of its own, and lets the unit go."""
        if grad_RH is not None:
            rows_RH = self._rows_of(unit, stored, stored)
            self._sink.gradient(chunk(unit), rows_RH, grad_RH.contiguous())
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

    def _compute(self, unit: Unit, stored: torch.Tensor) -> torch.Tensor:
        return self.model.as_compute(unit, stored)

    def _forget(self) -> None:
        """Drops graphs and gradients, also after a failure."""
        self.tape, self.hidden, self.running, self.embedded = None, [], [], {}
        self._final = self._whole = False
        self._sink = None
        for tensor in self.layout.tensors:
            tensor.param.grad = None


def _expandable_segments() -> None:
    """PYTORCH_ALLOC_CONF=expandable_segments:True, from here on."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change("expandable_segments:True")


def _calling(method: weakref.WeakMethod) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep its owner alive: a parameter's hooks are out of the garbage collector's sight."""

    def hook(param: nn.Parameter) -> None:
        if (call := method()) is not None:
            call(param)

    return hook


def chunk(unit: Unit) -> FlatTensor:
    """The rows of a table that a unit holds, as a tensor of their own."""
    tensor, (first, last) = unit.tensors[0], unit.rows
    if (first, last) == (0, tensor.shape[0]):
        return tensor
    shape = torch.Size((last - first, tensor.shape[1]))
    return replace(tensor, name=f"{tensor.name}[{first}:{last}]", start=unit.start, shape=shape)


def _add(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if more is None or total is None:
        return more if total is None else total
    return total + more
