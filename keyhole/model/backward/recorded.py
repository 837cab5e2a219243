"""Small blocks as CUDA graphs: their forward, and their recomputation and backward pass (model/recorder.py).

A block's forward is some forty kernels, its backward three times as many; with a small model or short sequences the
host, which launches them, is the bottleneck. So each block is recorded once per pass and shape of its inputs:

    forward    inputs -> output
    reverse    inputs, gradient of the output -> gradient of the input; gradients of matrices in one buffer
               (UnitGradients, sink.py); those of other parameters at addresses of their own

A reverse recomputes its block first. Or, where there is room (activations: auto), the forward is captured together with
its autograd graph, which the recording holds for good: each replay of the forward fills its activations, and the
reverse only reads them: a quarter less work. They must not lie where another graph, captured earlier, has a temporary,
since it may be replayed before they are used. So such forwards have pools of their own, one per pass and shape of
inputs, in which memory is reused from one block to a later one only; a forward that is captured out of order begins a
new one.

Updates that are kernels at fixed addresses, with their numbers on the device, are recorded as well. A compiled
block runs on static memory once before it is captured, since what is compiled or chosen then cannot be. A resident
block always has the same addresses, a streamed one has those of its slot.

A visit is recorded if it is a function of its inputs and weights (no mapping, no random numbers), all blocks are small
in all passes of the step, the budget, if there is one, has room for all of a step, no block is used twice in a pass (a
second output would overwrite the first), the user has no hook in it (recorder.py), its gradients reach no parameters
but its own, and the sink's `linear` can be recorded (sink.py: any other sink that takes gradients as tensors is wrapped
in UnitGradients).

A block's output and the gradient of its input are static memory that the graph writes and the next block's graph reads:
nothing is copied between two graphs. Gradients of inputs lie in two places that take turns.

Bytes per pass: outputs of all blocks and two gradients, of the longest shape; per shape, in the pool one block's
activations, or, where they are kept, those of all blocks.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from keyhole.machine.gpu import ACCELERATOR
from keyhole.model.backward.block_call import BlockGraph, Gradients, Result, Values
from keyhole.model.backward.kept_blocks import KeptBlocks
from keyhole.model.backward.memory import COPIES, FREE_SHARE, block_bytes, recording_bytes
from keyhole.model.backward.recompute import Recompute
from keyhole.model.backward.sink import NOTHING, HandOver, RecordableSink, Sink, UnitGradients
from keyhole.model.backward.tape import KeptInputs, RunAgain
from keyhole.model.forward.blocks import SMALL_FLOP
from keyhole.model.model import Model
from keyhole.model.recorder import (
    OTHER_BITS,
    Pool,
    Recorder,
    Recording,
    UsersHooks,
    copied,
    copying,
    signature_of,
    tensors_of,
)
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.layout import Unit
from keyhole.weak import weakly

MOST_GRAPHS = 2048  # a few shapes of forward and reverse for each block
MOST_PARAMETERS = 2**20  # elements of parameter gradients per recording; those of linear layers go to the buffer


def has_room(model: Model, spare: SpareMemory) -> bool:
    """Whether recordings fit in memory: the gradients of a block, and within a budget all that the passes of the
    planned step may record."""
    needed = block_bytes(model.layout, model.dtype.itemsize)
    if model.device.type != ACCELERATOR or needed == 0:
        return False
    if spare.placed is None or spare.budget_bytes is None:
        return needed <= spare.left() * FREE_SHARE
    work, most = spare.placed.work, int(SMALL_FLOP * model.dtype.itemsize) // (2 * needed)
    recorded = work.passes * recording_bytes(model.layout, model.dtype.itemsize, min(work.tokens, most))
    return spare.covers() and spare.has(max(COPIES * needed, recorded + spare.workspace_bytes))


class RecordedBlocks(Recorder):
    """Runs the forward and the backward pass of visits, recorded if possible. kept: says where there is room to keep
    activations (None: nowhere)."""

    def __init__(
        self,
        model: Model,
        units_of: dict[int, list[Unit]],
        gradients: HandOver,
        recompute: list[Recompute] | None,
        spare: SpareMemory,
        kept: KeptBlocks | None = None,
    ) -> None:
        super().__init__(spare, MOST_GRAPHS)
        self.model, self.units_of, self.gradients, self.recompute = model, units_of, gradients, recompute
        self.kept = kept
        self.gathered: UnitGradients | None = None
        self.kept_pools: dict[Hashable, tuple[int, Pool]] = {}  # of kept activations: the last block, and the pool
        self.ran: dict[tuple[int, int], Recording] = {}  # (pass, block) -> its forward of this pass, if it was replayed
        self.parameters = [list(block.parameters()) for block in model.blocks]
        self.hooks = [UsersHooks(block.modules()) for block in model.blocks]
        self.visited: set[tuple[int, int]] = set()  # (pass, block) of this forward pass
        self.repeats = False  # whether a block is used twice in a pass
        self.tokens: list[int] = []  # per pass of this step

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin(self, tokens: list[int]) -> bool:
        """A step begins, on so many tokens per pass; returns whether its blocks are recorded."""
        self.tokens = tokens
        return 2 * block_bytes(self.model.layout, itemsize=1) * max(tokens) <= SMALL_FLOP

    def leave(self) -> None:
        """The step is over, also after an error: drops the sink, which holds a reference to the Reverse."""
        self.visited.clear()
        if self.gathered is not None:
            self.gathered.in_front_of(NOTHING)

    def end(self) -> None:
        """Gives all memory back: the budget was planned for smaller steps than this one."""
        self.forget()
        self.gathered = None
        self.spare.held.clear()

    def forget(self) -> None:
        super().forget()
        self.ran.clear()
        self.kept_pools.clear()

    def front_of(self, sink: Sink) -> Sink:
        """The sink itself, or UnitGradients in front of it."""
        if sink.by_factors or self.repeats:
            return sink
        self.gathered = self.gathered or UnitGradients(self.model.layout, self.model.dtype, self)
        return self.gathered.in_front_of(sink)

    def _key(self, kind: str, visit: KeptInputs, values: Values) -> tuple[Hashable, ...] | None:
        """All that the launches of a visit depend on; that is also where its weights are, and which of them are
        trained, since a user may freeze some between steps. None: it runs eagerly."""
        if visit.call.empty or visit.draws or self.repeats or self.hooks[visit.block].any():
            return None
        shapes = signature_of(values)
        weights = tuple([(param.data_ptr(), param.requires_grad) for param in self.parameters[visit.block]])
        return None if shapes is None else (kind, visit.index, visit.block, shapes, weights)

    # -- forward ---------------------------------------------------------------------------------------------------

    def first_run(self, visit: KeptInputs) -> Result:
        """The first run of a visit."""
        here = visit.index, visit.block
        self.repeats = self.repeats or here in self.visited
        self.visited.add(here)
        self.ran.pop(here, None)
        key = self._key("forward", visit, visit.values)
        if key is None or not self.is_due(key) or not self.may_run(key := (*key, self.addresses(visit.values))):
            return visit.run_first()
        if (one := self.recordings.get(key)) is None:
            return self._record_forward(visit, key), []
        self.ran[here] = one
        self._static(visit)
        return one.replay(), []

    def _static(self, visit: KeptInputs) -> Values:
        """The visit's inputs in static memory. What has a gradient, and was not left there by a graph, has a place of
        the block's own if activations may be kept: the block's graph reads it in the backward pass."""
        own = (visit.index, visit.block if self.kept is not None else 0)
        return [
            self.place_of(own if i in visit.origins else visit.index, i, v) if isinstance(v, torch.Tensor) else v
            for i, v in enumerate(visit.values)
        ]

    def _record_forward(self, visit: KeptInputs, key: tuple) -> Any:
        """Runs a block eagerly, and captures it: if there is room, together with its autograd graph."""
        here, of = (visit.index, visit.block), (visit.index, key[3])
        expected, static = visit.run_first()[0], self._static(visit)
        places = self.results_like(("output", *here), expected)
        self.recordings[key] = None
        if self.kept is not None and self.kept.has_room(self.tokens[visit.index]):
            # read by tensors with version counters of their own: static memory changes before each use of the graph
            values, kept = [v.data if isinstance(v, torch.Tensor) else v for v in static], list[BlockGraph]()

            def run() -> Any:
                graph, (output, _) = visit.graph(values, partial(self._run_whole, visit.block))
                kept[:] = [graph]
                return output

            self._rehearse(run)
            kept.clear()  # else nodes of its parameters, of the ordinary stream, would be those of the captured graph
            pool = self._kept_pool(of, visit.block)
            self.verify(key, self.capture(copying(run, places), pool, "kept graphs"), expected)
            if (one := self.recordings[key]) is None:  # a pool goes with its last graph
                self.kept_pools.pop(of)
            else:
                one.kept = kept
        if self.recordings[key] is None:
            self._rehearse(lambda: visit.run_first(static))
            self.verify(key, self.capture(copying(lambda: visit.run_first(static)[0], places)), expected)
        if (one := self.recordings[key]) is None:
            return expected
        self.ran[here] = one
        return one.result

    def _rehearse(self, run: Callable[[], object]) -> None:
        """Compiled blocks (the only ones that we do not recompute): what is compiled now is not in the capture."""
        if self.recompute is None:
            run()

    def _run_whole(self, block: int, call: Callable[[], Any]) -> Any:
        """A run of a block whose graph is kept for good: it must not hold what this object holds."""
        return call() if self.recompute is None else self.recompute[block].run_whole(call, weakly(self.gradients.offer))

    def _kept_pool(self, of: Hashable, block: int) -> Pool:
        """The pool of kept activations of a pass and shape: a new one if the block is not later than the last one."""
        last, pool = self.kept_pools.get(of, (block, None))
        if pool is None or last >= block:
            pool = self.new_pool()
        self.kept_pools[of] = block, pool
        return pool

    # -- reverse ---------------------------------------------------------------------------------------------------

    def reverse(self, visit: KeptInputs, grads: Values, run_again: RunAgain) -> bool:
        """The backward pass of the visit from the gradients of its outputs, if it is recorded."""
        block, turn, gradients, sink = visit.block, visit.index, self.gradients, self.gradients.sink
        first, ran = self._key("reverse", visit, [*visit.values, *grads]), self.ran.get((turn, block))
        if first is None or not isinstance(sink, RecordableSink) or (state := sink.state(self.units_of[block])) is None:
            return False
        kept = ran is not None and bool(ran.kept)
        key = (*first, self.addresses([*visit.values, *grads]), state, kept)
        if not self.is_due((*first, state, kept)) or ran is None or not self.may_run(key):
            return False
        own = [param for param in self.parameters[block] if param.requires_grad]
        found: tuple[Gradients, Values] | None
        if (one := self.recordings.get(key)) is None:
            found = self._record_reverse(visit, sink, key, ran.kept, grads, run_again, own)
            if found is None:
                return False
        else:
            if not ran.kept:  # a graph that was kept has the inputs
                self._static(visit)
            self.copy_in(("gradient", turn), grads)
            found = one.replay()
            sink.received |= {tensor.name: (tensor, gradients.stored[id(tensor.param)]) for tensor in one.offers}
        for param, grad in zip(own, found[1], strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad
                gradients.accumulated(param)
        below = [visit.origins[i] for i in found[0]]
        reads = all(not isinstance(origin, GradientEdge) and origin[0].block == block - 1 for origin in below)
        visit.pass_on(found[0] if reads else copied(found[0]))  # the next block but one overwrites them
        return True

    def _record_reverse(
        self,
        visit: KeptInputs,
        sink: RecordableSink,
        key: tuple,
        kept: list[BlockGraph],
        grads: Values,
        run_again: RunAgain,
        own: list[nn.Parameter],
    ) -> tuple[Gradients, Values] | None:
        """Runs a backward pass eagerly, and captures it. None: it reaches parameters outside of the block, and nothing
        was done."""
        memory, received, self.recordings[key] = sink.memory(self.units_of[visit.block]), dict(sink.received), None
        graph = visit.graph(visit.values, run_again)[0]
        if graph.reaches({id(t.param) for t in self.model.layout.tensors} - {id(param) for param in own}):
            return None
        before, self.gradients.offers = [flat.clone() for flat in memory], []
        expected = graph.backward(grads, own)
        offers, self.gradients.offers = self.gradients.offers, None
        del graph  # its nodes of parameters belong to the ordinary stream, and would be those of the captured graph
        after, noted, one = [flat.clone() for flat in memory], dict(sink.received), None
        if sum(g.numel() for g in tensors_of(expected[1])) <= MOST_PARAMETERS:
            inputs = [] if kept else self._static(visit)
            of_outputs = self.copy_in(("gradient", visit.index), grads)
            places = (
                self.results_like(("input gradient", visit.index, visit.block % 2), expected[0]),
                self.copy_in(("parameter gradient", visit.index, visit.block), expected[1]),
            )

            def run() -> tuple[Gradients, Values]:
                sink.received = dict(received)
                made = kept[0] if kept else visit.graph(inputs, run_again)[0]
                return made.backward(of_outputs, own, keep=bool(kept))

            self._rehearse(run)
            for flat, old in zip(memory, before, strict=True):
                flat.copy_(old)
            one = self.capture(copying(run, places))
        self.verify(key, one, expected)
        if one is not None:
            one.offers = offers
        if self.recordings[key] is not None and not all(map(torch.equal, memory, after)):
            self.recordings[key], self.why = None, OTHER_BITS
        if self.recordings[key] is None:
            kept.clear()  # from the next step on, this block is recomputed
        for flat, new in zip(memory, after, strict=True):
            flat.copy_(new)
        sink.received = noted  # the run that is captured may have been aborted
        return expected if (one := self.recordings[key]) is None else one.result
