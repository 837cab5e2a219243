"""The backward pass of a model, one block at a time, keeping no gradient.

    forward    units arrive in order, all micro-batches run through each; block inputs are kept (tape.py)
    head       logits in chunks of the vocabulary: once for the loss, once more for gradients (vocabulary.py)
    reverse    units arrive in reverse order; a block is recomputed, differentiated for every micro-batch, and its
               complete gradients are handed to a *sink* (sink.py) before the next block is loaded
    embedding  its gradient is a few rows, scattered into one chunk of the table at a time
    common     norms and other small tensors that are used in many places, at the end

So at any time the gradients of at most one block exist; with one micro-batch, and linear layers that offer their
gradients (recompute.py), those of at most one matrix.

Link traffic per step: each block twice H2D, and once D2H if the sink changed it. Clipping by the exact global norm
adds one more backward pass, which changes nothing: three times H2D. Experts that are units of their own are loaded
inside a block (experts.py): each expert that received tokens twice H2D, and once more per further backward pass; in the
first step, and if a block saves tensors behind its experts, once more per backward pass.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.machine.gpu import ACCELERATOR
from keyhole.machine.settings import expandable_segments, stream_warning
from keyhole.model.backward.activation_store import ActivationStore
from keyhole.model.backward.attention import exact_attention
from keyhole.model.backward.block_call import Compiled
from keyhole.model.backward.experts import ExpertGradients
from keyhole.model.backward.kept_blocks import KeptBlocks
from keyhole.model.backward.memory import input_bytes
from keyhole.model.backward.recompute import Recompute, linears_offer
from keyhole.model.backward.recorded import RecordedBlocks, has_room
from keyhole.model.backward.refusals import check_hooks, check_model, refused_losses
from keyhole.model.backward.sink import HandOver, Sink
from keyhole.model.backward.tape import Tape
from keyhole.model.backward.vocabulary import VocabularyGradients
from keyhole.model.batch import DeviceBatch
from keyhole.model.model import Model
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.layout import Unit
from keyhole.model.weights.homes import view
from keyhole.weak import weakly

Turn = Callable[[int], AbstractContextManager[None]]


class Reverse:
    """Forward and backward pass of the micro-batches of one step.

    activations: what is kept between the two (tape.py). fused: linear layers offer their gradients as factors.
    compiled: blocks run through torch.compile, with this backend (True: inductor). second_run: makes the object that
    recomputes a block, if fused. deterministic: attention gives the same bits every time (attention.py).
    """

    def __init__(
        self,
        model: Model,
        *,
        activations: str = "block",
        fused: bool = True,
        compiled: bool | str = False,
        second_run: Callable[[nn.Module], Recompute] = Recompute,
        deterministic: bool = True,
    ) -> None:
        self.model, self.layout, self.activations, self.fused = model, model.layout, activations, fused
        self.deterministic = deterministic
        own = [u for u in model.layout.of_kind("block") if u.expert is None]
        self.units_of = {i: [u for u in own if u.block == i] for i in range(len(model.blocks))}
        check_model(model, activations, self.units_of)
        if model.device.type == ACCELERATOR:  # activations of many sizes fragment the allocator's memory
            expandable_segments(model.changes)
        self.keeps_all = activations == "none"
        backend = compiled if isinstance(compiled, str) else "inductor"
        self.compiled = Compiled(backend, model.changes, keep=self.keeps_all) if compiled else None
        runs_again = fused and not (compiled or self.keeps_all)
        self.recompute = [second_run(block) for block in model.blocks] if runs_again else None
        self.trains = any(tensor.param.requires_grad for tensor in model.layout.tensors)
        moves = activations in ("host", "auto") and model.device.type == ACCELERATOR
        self.store = ActivationStore(model.device, may_move=moves)
        self.vocabulary = VocabularyGradients(model)
        self.gradients = HandOver(self.layout)
        self.experts = None
        if self.layout.experts:
            most_units = max(map(len, self.units_of.values()), default=0)
            self.experts = ExpertGradients(model, self.gradients, first_place=most_units)
        spare = SpareMemory(model.placed, model.device)
        self.kept = KeptBlocks(model, spare) if activations == ("none" if compiled else "auto") else None
        self.recorded: RecordedBlocks | None = None
        records = fused and model.reverse_graphs and model.graphs is not None and not model.sharded
        if records and activations in ("block", "auto", *["none"] * bool(compiled)) and has_room(model, spare):
            self.recorded = RecordedBlocks(model, self.units_of, self.gradients, self.recompute, spare, self.kept)
            if self.kept is not None:
                model.changes.set(stream_warning(), False)
        self.tape, self.hidden = Tape(self.store), list[Any]()
        self._longest = 0  # tokens of a row in this step
        for tensor in self.layout.tensors:
            if tensor.param.requires_grad:
                tensor.param.register_post_accumulate_grad_hook(weakly(self.gradients.accumulated))

    # -- one step --------------------------------------------------------------------------------------------------

    @contextmanager
    def sweep(self, reverses: int = 1) -> Iterator[None]:
        """A context for one step: a forward pass and `reverses` backward passes."""
        check_hooks(self.model)
        head, table = ([u.index for u in units] for units in (self.layout.head_units, self.layout.of_kind("table")))
        blocks = [[unit.index for unit in units] for units in self.units_of.values()]  # a block's come in one order
        order = [*sum(blocks, []), *head, *[*head, *sum(blocks[::-1], []), *table] * reverses]
        with self.model.sweep(f"train with {reverses}", order=order):
            try:
                self.model.expert_gradients = self.experts
                yield
            finally:  # drops graphs and gradients, also after an error
                self.model.expert_gradients = None
                self.tape, self.hidden = Tape(self.store), []
                self.vocabulary.forget()
                self.gradients.end()
                self.store.parked.clear()
                if self.recorded is not None:
                    self.recorded.leave()
                if self.experts is not None:
                    self.experts.drop()
                for tensor in self.layout.tensors:
                    tensor.param.grad = None

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        batches: list[DeviceBatch],
        turn: Turn = lambda index: nullcontext(),
        loss_count: int | None = None,
        weight: float = 1.0,
    ) -> torch.Tensor:
        """The mean loss over all trained tokens of all micro-batches, on the device. turn: makes a context in which the
        pass of a micro-batch is resumed. loss_count, weight: see vocabulary.py."""
        model = self.model
        self.tape = self._tape(batches)
        self.common = model.device_weights.acquire(self.layout.common)
        # compiled code cannot stop inside a block; ranks must visit the same units, whichever experts their tokens need
        block_at_once = self.compiled is not None or model.sharded
        block_at_once = block_at_once or (len(batches) > 1 and not self.layout.has_expert_units)
        store, holds = self.store, model.holds
        parks = store.parks and block_at_once
        held: list[Unit] = []

        def release(next_unit: Unit | None) -> None:
            same_block = block_at_once and next_unit is not None and held and next_unit.block == held[0].block
            if not same_block or next_unit is held[0]:  # the same block again: a model may use a block twice
                for unit in held:
                    model.engine.release(unit.index)
                held.clear()

        def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
            release(unit)
            model.binding.bind(unit, model.device_weights.acquire(unit, len(held)) if unit else None, self.common)
            held.extend([unit] if unit else [])
            runs = unit is None or unit is self.units_of[unit.block or 0][-1]  # else the pass meets the next unit
            for i in range(len(batches)):
                if parks and runs:
                    store.restore(i)
                    store.prefetch(i + 1)
                with turn(i):
                    resume(i)
                if parks and runs and i in holds:
                    store.park(i, *holds.pop(i))

        def current_pass() -> int:
            assert model.conductor is not None
            return model.conductor.current.index

        self._longest = max(one.inputs["input_ids"].shape[-1] for one in batches)
        saved = torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack) if parks else nullcontext()
        with torch.enable_grad(), self.tape.recording(model.blocks, current_pass), self._attention(), saved:
            self.hidden = model.lockstep(batches, serve, self.vocabulary.rows, block_at_once=block_at_once)
            release(None)
        self.vocabulary.drop_rows()
        model.binding.bind(None, None, self.common)
        return self.vocabulary.loss(self.hidden, batches, self.common, loss_count, weight)

    def _attention(self) -> AbstractContextManager[None]:
        return exact_attention(self.model.device, self._longest) if self.deterministic else nullcontext()

    def _tape(self, batches: list[DeviceBatch]) -> Tape:
        """What this step keeps: decided here, once."""
        tokens, recorded = [one.inputs["input_ids"].numel() for one in batches], self.recorded
        may_draw = any(part.training for part in self.model.methods.parts)
        if recorded is not None and not recorded.spare.covers(tokens):
            recorded.end()
            self.recorded = recorded = None
        if self.compiled is not None:  # with one micro-batch, the product that a linear layer offers is complete
            self.compiled.offer = self.model.device if self.fused and len(batches) == 1 else None
            recorded = recorded if len(batches) == 1 and not may_draw else None
        if recorded is not None and not recorded.begin(tokens):
            recorded = None
        room = None if self.model.placed is None or recorded is not None else self.model.placed.input_bytes
        each = input_bytes(self.layout, sum(tokens), self.model.dtype.itemsize)
        self.store.begin(len(self.model.blocks), each, room, self.activations == "host", self._parks(len(tokens)))
        first_kept = math.inf
        if recorded is None and (self.compiled is not None or self.keeps_all):
            first_kept = 0
        elif recorded is None and self.kept is not None:
            first_kept = self.kept.first_kept(sum(tokens))
        return Tape(self.store, first_kept, self.compiled, recorded, may_draw)

    def _parks(self, passes: int) -> bool | None:
        """Whether passes are parked between blocks; None: where they must. Ranks visit the head alike, however many
        tokens each has; experts stop passes inside of a block."""
        if passes == 1 or self.model.sharded or self.layout.has_expert_units:
            return False
        return True if self.model.placed is not None and self.model.placed.parks else None

    # -- reverse ---------------------------------------------------------------------------------------------------

    def reverse(self, sink: Sink, *, loss_scale: float = 1.0, last: bool = True) -> None:
        """Hands every gradient of loss_scale * loss to the sink, once. last: the tape may be freed."""
        if self.tape.recorded is not None:
            sink = self.tape.recorded.front_of(sink)
        self.gradients.begin(sink)
        self.tape.restart()
        self.vocabulary.restart(loss_scale)
        self._reverse_end(sink, last)
        with self._attention():
            self._reverse_blocks(last)
        self.vocabulary.reverse_embedding(sink)
        self._reverse_common(sink)

    def _reverse_end(self, sink: Sink, last: bool) -> None:
        """What comes after the last block. Its graph goes, if no further backward pass needs it: it holds the outputs
        of the last block, their gradients, and of a norm the same in float32, for every micro-batch."""
        for i, grad_NH in self.vocabulary.reverse_head(sink, grouped=self.store.parks):
            torch.autograd.backward(self.hidden[i], grad_NH, retain_graph=True)
            if last:
                self.hidden[i] = None
            if self.store.parks and i in self.tape.stops[-1]:
                self.tape.stops[-1][i].move_grads()
        if last:
            self.vocabulary.drop_hidden()

    def _reverse_blocks(self, last: bool) -> None:
        """Units backwards: a block's weights arrive, each pass through it is differentiated and its gradients go to the
        sink, and what the sink has changed is written back."""
        gradients, stops = self.gradients, self.tape.stops
        to_come = Counter(block for stop in stops for block in {visit.block for visit in stop.values()})
        visits_of = Counter(visit.block for stop in stops for visit in stop.values())
        coming = iter([visit for stop in reversed(stops) for visit in stop.values()][1:])
        for i in reversed(range(len(stops))):
            visits = list(stops[i].values())
            block = visits[0].block
            for place, unit in enumerate(self.units_of[block]):
                stored = self.model.engine.acquire(unit.index, changes=self.trains)
                computed = self.model.device_weights.in_compute_dtype(unit, stored, place)
                views = self.model.binding.bind(unit, computed, self.common)
                if self.trains:
                    gradients.enter_unit(unit, stored, views)
            to_come[block] -= 1
            gradients.visited_once = visits_of[block] == 1
            for visit in visits:
                gradients.is_final = to_come[block] == 0 and visit is visits[-1]
                if (after := next(coming, None)) is not None:
                    after.prefetch()
                with linears_offer(None if self.compiled is None else self.compiled.offer, gradients.offer_at):
                    visit.reverse(visit.take_grads(), partial(self._run_again, block), last)
                for waiting in visit.call.on_host if last else ():
                    waiting.release()
                if self.store.parks:
                    self.vocabulary.move_row_grads(self.store)
                    visit.move_inputs_grads()
            self._release_block(block, done=to_come[block] == 0)
            if last:
                stops.pop()
        gradients.is_final = gradients.visited_once = False
        assert not self.model.engine.held, "a block was not released"

    def _run_again(self, block: int, call: Callable[[], Any]) -> Any:
        if self.experts is not None:
            self.experts.forget_calls(block)
        return call() if self.recompute is None else self.recompute[block].run(call, self.gradients.offer, self.experts)

    def _release_block(self, block: int, done: bool) -> None:
        """done: no further gradient of the block will come."""
        if done and self.experts is not None:
            self.experts.finish_block(block)
        for unit in self.units_of[block]:
            if done:
                self.gradients.is_final = True
                for param in [tensor.param for tensor in unit.tensors if tensor.param.grad is not None]:
                    self.gradients.accumulated(param)  # where the last visit added nothing, the hook did not run
                if self.gradients.sink.finished(unit):
                    self.model.engine.commit(unit.index)
            self.model.engine.release(unit.index)
        self.gradients.leave_block()

    @torch.no_grad()
    def _reverse_common(self, sink: Sink) -> None:
        engine, unit = self.model.engine, self.layout.common
        stored = engine.acquire(unit.index, changes=self.trains)
        reached = {tensor.name for tensor in unit.tensors if tensor.param.grad is not None}
        if self.model.sharded:  # reached on any rank
            reached = set().union(*self.model.ranks.objects(reached))
        found = []
        for tensor in [one for one in unit.tensors if one.name in reached]:
            grad, w = tensor.param.grad, view(stored, tensor, unit.start)
            found.append((tensor, w, torch.zeros_like(w) if grad is None else grad))
            tensor.param.grad = None
        sink.gradients_together(found)
        if sink.finished(unit):
            engine.commit(unit.index)
        engine.release(unit.index)

    # -- a loss of the caller's ------------------------------------------------------------------------------------

    def walk(self, loss: torch.Tensor, sink: Sink, last: bool = True) -> None:
        """Like `reverse`, for a loss that was computed with the module itself while all weights are at home: autograd
        runs backward through the whole model, and each gradient is handed over as soon as it is complete."""
        engine, units, gradients = self.model.engine, self.layout.units, self.gradients
        gradients.begin(sink, whole=True)
        try:
            with engine.sweep("walk", []):
                for unit in units:
                    engine.acquire(unit.index)
                with refused_losses():
                    loss.backward(retain_graph=not last)
                if self.trains and not gradients.count:
                    raise UserError(
                        "backward(loss): no weight of this model received a gradient: the loss is not computed from it"
                    )
                for unit in units:
                    if sink.finished(unit):
                        engine.commit(unit.index)
        finally:
            gradients.end()
