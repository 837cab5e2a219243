"""Small blocks as CUDA graphs: their forward, and their recomputation and backward pass (model/recorder.py).

A block's forward is some forty kernels, its backward three times as many; with a small model or short sequences the
host, which launches them, is the bottleneck. So each block is recorded once per pass and shape of its inputs:

    forward    static inputs -> static output, which is the next block's static input
    reverse    static inputs, gradient of the output -> gradient of the input, which goes from block to block through
               two places that alternate; gradients of matrices in the buffer of unit_gradients.py; other gradients

A reverse recomputes its block first. Or, where there is room (activations: auto), the forward is captured together with
its autograd graph, which the recording holds for good: each replay of the forward fills its activations, and the
reverse only reads them: a quarter less work. They must not lie where another graph, captured earlier, has a temporary,
since it may be replayed before they are used. So such forwards have pools of their own, one per pass and shape of
inputs, in which memory is reused from one block to a later one only; a forward that is captured out of order begins a
new one.

Updates that are kernels at fixed addresses, with their numbers on the device, are recorded as well (`update`). Compiled
blocks (compiled.py) run on static memory once before they are captured, since what is compiled or chosen then cannot
be. A resident block always has the same addresses, a streamed one has those of its slot.

A visit is recorded if it is a function of its inputs and weights (no mapping, no random numbers), all blocks are small
in all passes of the step, the budget, if there is one, has room for so many tokens, no block is used twice in a pass (a
second output would overwrite the first), the user has no hook in it (recorder.py), its gradients reach no
parameters but its own, and the sink's `linear` can be recorded (sink.py: any other sink that takes gradients as tensors
is wrapped in UnitGradients).

Bytes per pass: the inputs of all blocks (which are kept in any case) for the longest shape, two gradients of such an
input, and in the pool one block's activations; where activations are kept, those of all blocks for every shape.
"""

from collections.abc import Callable, Hashable
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch

from keyhole.model.backward.activation_store import KeptBlocks
from keyhole.model.backward.block_graph import BlockGraph, Result
from keyhole.model.backward.memory import recording_bytes
from keyhole.model.backward.sink import HandOver, RecordableSink, Sink
from keyhole.model.backward.tape import KeptInputs, pass_on
from keyhole.model.backward.unit_gradients import UnitGradients
from keyhole.model.batch import DeviceBatch
from keyhole.model.forward.graphs import SMALL_FLOP
from keyhole.model.model import Model
from keyhole.model.recorder import (
    OTHER_BITS,
    Recorder,
    Recording,
    UsersHooks,
    Values,
    copy_into,
    signature_of,
    tensors_of,
)
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.layout import FlatTensor, Unit

MOST_GRAPHS = 2048  # a few shapes of forward and reverse for each block
MOST_PARAMETERS = 2**20  # elements of parameter gradients per recording; those of linear layers go to the buffer

RunAgain = Callable[[int, Callable[[], Any]], Any]
"""(block, call): recomputes a block, whose linear layers offer their gradients."""


class RecordedBlocks(Recorder):
    """Runs the forward and the backward pass of visits, recorded if possible. run_whole: like RunAgain, for the first
    run of a block; rehearses: blocks are compiled; kept: says where there is room to keep activations (None: nowhere).
    """

    def __init__(
        self,
        model: Model,
        units_of: dict[int, list[Unit]],
        run_whole: RunAgain,
        spare: SpareMemory,
        rehearses: bool = False,
        kept: KeptBlocks | None = None,
    ) -> None:
        super().__init__(spare, MOST_GRAPHS)
        self.model, self.units_of, self.run_whole = model, units_of, run_whole
        self.rehearses, self.kept = rehearses, kept
        self.kept_pools: dict[Hashable, tuple[int, Any]] = {}  # of kept activations: the last block, and the pool
        self.ran: dict[tuple[int, int], Recording] = {}  # (pass, block) -> its forward of this pass, if it was replayed
        self.largest = max((sum(unit.numel for unit in units) for units in units_of.values()), default=0)
        self.parameters = [list(block.parameters()) for block in model.blocks]
        self.all = {id(tensor.param) for tensor in model.layout.tensors}
        self.hooks = [UsersHooks(block.modules()) for block in model.blocks]
        self.hooked: set[int] = set()  # blocks with hooks of the user's, in this step
        self.trained: list[bool] = []  # per parameter of all blocks, whether it is trained
        self.visited: set[tuple[int, int]] = set()  # (pass, block) of this forward pass
        self.repeats = False  # whether a block is used twice in a pass
        self.tokens: tuple[int, ...] = ()  # per pass of this step; empty: nothing is recorded in it
        self.fits: dict[tuple[int, ...], bool] = {}  # by tokens per pass: whether recordings fit in the budget
        self.longest_passes: tuple[int, ...] = ()  # of the steps that do
        self.offers: list[FlatTensor] | None = None  # of the backward pass that will be captured

    @cached_property
    def gathered(self) -> UnitGradients:
        """Made when it is first used: large compiled blocks do not need its memory."""
        return UnitGradients(self.model.layout, self.model.dtype, self)

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin(self, batches: list[DeviceBatch]) -> bool:
        """A step begins; returns whether its blocks are recorded. If the user has frozen a parameter since the last
        one, or trains one again, nothing that was recorded is right."""
        self.hooked = {block for block, hooks in enumerate(self.hooks) if hooks.any()}
        trained = [param.requires_grad for block in self.parameters for param in block]
        if trained != self.trained:
            self.own = [[param for param in block if param.requires_grad] for block in self.parameters]
            if self.trained:
                self.forget()
            self.trained = trained
        tokens = tuple(one.inputs["input_ids"].numel() for one in batches)
        small = 2 * self.largest * max(tokens) <= SMALL_FLOP and self._fits(tokens)
        self.tokens = tokens if small else ()
        return small

    def leave(self) -> None:
        """The step is over, also after an error."""
        self.offers = None
        self.visited.clear()
        if "gathered" in vars(self):
            self.gathered.leave()

    def end(self) -> None:
        """Gives all memory back: the budget was planned for smaller steps than this one."""
        self.forget()
        vars(self).pop("gathered", None)
        self.spare.held.clear()

    def forget(self) -> None:
        super().forget()
        self.ran.clear()
        self.kept_pools.clear()
        for kind in [one for one in self.seen if one[0] == "reverse" and one[-1]]:  # type: ignore[index]
            del self.seen[kind]  # of forwards that are dropped

    def _fits(self, tokens: tuple[int, ...]) -> bool:
        """Whether recordings of passes over so many tokens fit in the budget beside the planned step, together with
        those of earlier steps, whose places they use."""
        if self.spare.budget_bytes is None:
            return True
        if tokens not in self.fits:
            longest = tuple(max(pair) for pair in zip_longest(tokens, self.longest_passes, fillvalue=0))
            needs = partial(recording_bytes, self.model.layout, self.model.dtype.itemsize)
            made = self.spare.held["graphs"] + self.spare.held["static memory"]
            to_come = max(max(map(needs, tokens)), sum(map(needs, longest)) - made)
            self.fits[tokens] = self.spare.has(to_come + self.spare.workspace_bytes)
            self.longest_passes = longest if self.fits[tokens] else self.longest_passes
        return self.fits[tokens]

    def _takes(self, visit: KeptInputs) -> bool:
        return bool(self.tokens) and visit.is_plain and not self.repeats and visit.block not in self.hooked

    def _addresses(self, visit: KeptInputs) -> tuple[int, ...]:
        return tuple([param.data_ptr() for param in self.parameters[visit.block]])

    # -- forward ---------------------------------------------------------------------------------------------------

    def first_run(self, visit: KeptInputs) -> Result:
        """The first run of a visit. Its output is valid until the next forward of the same pass."""
        turn, block = here = (visit.index, visit.block)
        self.repeats = self.repeats or here in self.visited
        self.visited.add(here)
        self.ran.pop(here, None)
        if not self._takes(visit):
            return visit.run_first()
        values, shapes = visit.values, signature_of(visit.values)
        kind = ("forward", turn, block, shapes, self._addresses(visit))
        key = (kind, self.sources_of(values))
        if shapes is None or not self.is_due(kind) or not self.has_room(key):
            return visit.run_first()
        if key not in self.recordings:
            result = self._record_forward(visit, kind, values)
        else:
            self.copy_in(turn, values)
            one = self.recordings[key]
            if one is None:
                return visit.run_first()
            self.ran[here], result = one, one.replay()
        return result, []

    def _record_forward(self, visit: KeptInputs, kind: tuple, values: Values) -> Any:
        """Runs a block eagerly, and captures it: if there is room, together with its autograd graph."""
        turn, block = here = (visit.index, visit.block)
        expected = result = visit.run_first()[0]
        places = self.places_for(("output", turn), block, len(self.parameters), tensors_of(expected))
        static = self.copy_in(turn, values)
        key = (kind, self.sources_of(values))  # only now: if memory had to grow, inputs have lost their place
        self.recordings[key] = None
        if self.kept is not None and self.kept.has_room(self.tokens[turn]):
            # read by tensors with version counters of their own: static memory changes before each use of the graph
            values, kept = [v.data if isinstance(v, torch.Tensor) else v for v in static], list[BlockGraph]()

            def run() -> Any:
                kept[:] = [visit.graph(values, partial(self.run_whole, block))]
                return copy_into(places, kept[0].result[0])

            self._rehearse(run)
            kept.clear()  # else nodes of its parameters, of the ordinary stream, would be those of the captured graph
            pool = self._kept_pool((turn, kind[3]), block)
            result = self.verified(key, self.capture(run, pool, "kept graphs"), expected)
            if (one := self.recordings[key]) is None:  # a pool goes with its last graph
                self.kept_pools.pop((turn, kind[3]))
            else:
                one.kept = kept
        if self.recordings[key] is None:
            self._rehearse(lambda: visit.run_first(static))
            result = self.verified(key, self.capture(lambda: copy_into(places, visit.run_first(static)[0])), expected)
        if (one := self.recordings[key]) is not None:
            self.ran[here] = one
        return result

    def _rehearse(self, run: Callable[[], Any]) -> None:
        if self.rehearses:
            run()

    def _kept_pool(self, of: Hashable, block: int) -> Any:
        """The pool of kept activations of a pass and shape: a new one if the block is not later than the last one."""
        last, pool = self.kept_pools.get(of, (block, None))
        if last >= block:
            pool = self.new_pool()
        self.kept_pools[of] = block, pool
        return pool

    # -- reverse ---------------------------------------------------------------------------------------------------

    def front_of(self, sink: Sink) -> Sink:
        """The sink itself, or UnitGradients in front of it."""
        return sink if sink.policy.by_factors or self.repeats else self.gathered.in_front_of(sink)

    def reverse(
        self,
        visit: KeptInputs,
        gradients: HandOver,
        grads: Values,
        run_again: RunAgain,
    ) -> bool:
        """The backward pass of the visit from the gradients of its outputs, if it is recorded."""
        block, turn, sink = visit.block, visit.index, gradients.sink
        if not self._takes(visit) or not isinstance(sink, RecordableSink):
            return False
        ran = self.ran.get((turn, block))
        kept = [] if ran is None else ran.kept
        read = [] if kept else visit.values  # a graph that was kept has the inputs
        state = sink.state(self.units_of[block])
        kind: tuple[Hashable, ...] = ("reverse", turn, block, signature_of([*visit.values, *grads]), state)
        kind = (*kind, self._addresses(visit), ran.number if kept and ran else 0)
        key = (kind, self.sources_of(read), self.sources_of(grads))
        if None in kind or not self.is_due(kind) or ran is None or not self.has_room(key):
            return False
        found: tuple[Values, Values]
        if key not in self.recordings:
            recorded = self._record_reverse(visit, sink, kind, read, grads, run_again)
            if recorded is None:
                return False
            found = recorded
        else:
            one = self.recordings[key]
            if one is None:
                return False
            self.copy_in(turn, read)
            self.copy_in(("gradient", turn), grads)
            found = one.replay()
            sink.replayed([(tensor, gradients.stored[id(tensor.param)]) for tensor in one.offers])
        for param, grad in zip(self.own[block], found[1], strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad
                gradients.accumulated(param)
        for origin, grad in zip(visit.origins.values(), found[0], strict=True):
            if grad is not None:
                below = isinstance(origin, tuple) and origin[0].block == block - 1  # used before it is overwritten
                pass_on(origin, grad if below or not self.is_static(grad) else grad.clone())
        return True

    def _record_reverse(
        self, visit: KeptInputs, sink: RecordableSink, kind: tuple, read: Values, grads: Values, run_again: RunAgain
    ) -> tuple[Values, Values] | None:
        """Runs a backward pass eagerly, and captures it. None: it reaches parameters outside of the block, and nothing
        was done."""
        turn, block = here = (visit.index, visit.block)
        own, memory, ran, mark = self.own[block], sink.memory(self.units_of[block]), self.ran.get(here), sink.mark()
        kept = ran.kept if ran is not None and not read else []

        of_grads = ("gradient", turn)
        key: tuple[Hashable, ...] = (kind, self.sources_of(read), self.sources_of(grads))
        graph = visit.graph(visit.values, partial(run_again, block))
        if graph.reaches(self.all - {id(param) for param in own}):
            self.recordings[key] = None
            return None
        before, self.offers = [flat.clone() for flat in memory], []
        expected = graph.gradients(grads, own)
        offers, self.offers = self.offers, None
        del graph  # its nodes of parameters belong to the ordinary stream, and would be those of the captured graph
        after, noted, one = [flat.clone() for flat in memory], sink.mark(), None
        if sum(g.numel() for g in tensors_of(expected[1])) <= MOST_PARAMETERS:
            places = self.places_for(("input gradient", turn), block % 2, 2, tensors_of(expected[0]))
            more = self.places_for(("parameter gradient", turn, block), 0, 1, tensors_of(expected[1]))
            if kept and self.ran.get(here) is not ran:  # memory has grown: the forward is dropped
                return expected
            static = self.copy_in(turn, read), self.copy_in(of_grads, grads)
            key = (kind, self.sources_of(read), self.sources_of(grads))  # again: see `_record_forward`

            def run() -> tuple[Values, Values]:
                sink.rewind(mark)
                made = kept[0] if kept else visit.graph(static[0], partial(run_again, block))
                of_inputs, of_parameters = made.gradients(static[1], own, keep=bool(kept))
                return copy_into(places, of_inputs), copy_into(more, of_parameters)

            self._rehearse(run)
            for flat, old in zip(memory, before, strict=True):
                flat.copy_(old)
            one = self.capture(run)
            if one is not None:
                one.offers = offers
        result = self.verified(key, one, expected)
        if self.recordings[key] is not None and not all(map(torch.equal, memory, after)):
            self.recordings[key], self.why = None, OTHER_BITS
        if self.recordings[key] is None:
            kept.clear()  # from the next step on, this block is recomputed
        for flat, new in zip(memory, after, strict=True):
            flat.copy_(new)
        sink.rewind(noted)  # the run that is captured may have been aborted
        return result

    def note_offer(self, tensor: FlatTensor) -> None:
        """The sink has accepted a product."""
        if self.offers is not None:
            self.offers.append(tensor)

    # -- updates ---------------------------------------------------------------------------------------------------

    def update(self, depends_on: Hashable, run: Callable[[], None]) -> bool:
        """run(), or the replay of it; returns whether it was replayed. The replay cannot be compared, because run
        changes what it reads. So run must launch kernels at addresses that are part of depends_on, and keep nothing
        that it allocates."""
        key = ("update", depends_on)
        alone = self.spare.budget_bytes is not None and not any(self.recordings.values())  # no room for the blocks
        if alone or not self.is_due(key) or not self.has_room(key):
            run()
            return False
        if key not in self.recordings:
            self.recordings[key] = self.capture(run)
        one = self.recordings[key]
        run() if one is None else one.replay()
        return one is not None
