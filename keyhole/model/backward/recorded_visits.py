"""Which visits of blocks run as CUDA graphs (recorded.py), and their backward pass, in place of Visit.reverse.

A visit is recorded (captured as a CUDA graph) if all of these hold. It is a function of its inputs and weights (no
mapping, no random numbers). Its block is small and used once per pass (a second visit would overwrite the output of the
first). A budget, if there is one, has room for recordings of so many tokens (model/spare_memory.py). No module in it
has a hook of the user's (forward/users_hooks.py). The first backward pass of the block, which always runs eagerly, gave
gradients only to the block's own parameters. The sink's `linear` can be recorded (sink.py: Recordable); any other sink
that takes gradients as tensors is wrapped in UnitGradients.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from keyhole.model.backward.block_graph import BlockGraph
from keyhole.model.backward.kept_blocks import KeptBlocks
from keyhole.model.backward.memory import recording_bytes
from keyhole.model.backward.recorded import RecordedBlocks
from keyhole.model.backward.sink import Recordable, Sink
from keyhole.model.backward.tape import Visit, pass_on
from keyhole.model.backward.unit_gradients import UnitGradients, runs_of
from keyhole.model.batch import DeviceBatch
from keyhole.model.forward.graphs import SMALL_FLOP
from keyhole.model.forward.users_hooks import UsersHooks
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit

RunAgain = Callable[[int, Callable[[], Any]], Any]
"""(block, call): recomputes a block, whose linear layers offer their gradients."""


class RecordedVisits:
    """Runs the forward and the backward pass of visits, recorded if possible. run_whole: like RunAgain, for the first
    run of a block; kept: says where there is room to keep its activations (None: nowhere)."""

    def __init__(
        self,
        model: Model,
        blocks: list[nn.Module],
        units_of: dict[int, list[Unit]],
        recorded: RecordedBlocks,
        run_whole: RunAgain,
        kept: KeptBlocks | None = None,
    ) -> None:
        self.blocks, self.run_whole, self.kept = recorded, run_whole, kept
        self.new_buffer = partial(UnitGradients, model.layout, model.dtype, self.blocks)
        self.needs = partial(recording_bytes, model.layout, model.dtype.itemsize)
        self.units_of = units_of
        self.numel_of = {block: sum(unit.numel for unit in units) for block, units in units_of.items()}
        self.parameters = [list(block.parameters()) for block in blocks]
        self.hooks = [UsersHooks(block.modules()) for block in blocks]
        self.hooked: set[int] = set()  # blocks with hooks of the user's, in this step
        self.takes_graphs: dict[type, bool] = {}  # by type of sink: whether it is Recordable
        self.trained: list[bool] = []  # per parameter of all blocks, whether it is trained
        self.reached: dict[int, set[int]] = {}  # by block: parameters that got a gradient in its first backward pass
        self.offers: dict[Any, list[FlatTensor]] = {}  # accepted offers of a recordable backward, by its dependencies
        self.visited: set[tuple[int, int]] = set()  # (pass, block) of this forward pass
        self.repeats = False  # whether a block is used twice in a pass
        self.fits: dict[tuple[int, int], bool] = {}  # by pass and tokens: whether recordings fit in the budget
        self.promised: dict[int, int] = {}  # by pass: the most tokens for which they do
        self._reaching: set[int] | None = None  # the entry of `reached` that is being filled
        self._offering: list[FlatTensor] | None = None  # the entry of `offers` that is being filled

    @cached_property
    def gathered(self) -> UnitGradients:
        """Made when it is first used: large compiled blocks do not need its memory."""
        return self.new_buffer()

    # -- forward ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins. If the user has frozen a parameter since the last one, or trains one again, nothing that was
        recorded is right."""
        self.hooked = {block for block, hooks in enumerate(self.hooks) if hooks.any()}
        trained = [param.requires_grad for block in self.parameters for param in block]
        if trained != self.trained:
            self.own = [[param for param in block if param.requires_grad] for block in self.parameters]
            self.reached.clear()
            self.offers.clear()
            if self.trained:
                self.blocks.forget()
            self.trained = trained

    def end(self) -> None:
        """Gives all memory back: the budget was planned for smaller steps than this one."""
        self.blocks.forget()
        vars(self).pop("gathered", None)
        self.blocks.spare.held.clear()

    def are_small(self, batches: list[DeviceBatch]) -> bool:
        """Whether every block is small in every pass, and may be recorded."""
        largest = max(self.numel_of.values(), default=0)
        tokens_of = [one.inputs["input_ids"].numel() for one in batches]
        small = all(2 * largest * tokens <= SMALL_FLOP for tokens in tokens_of)
        return small and all(self._fits(turn, tokens) for turn, tokens in enumerate(tokens_of))

    def _is_small(self, visit: Visit, values: list[Any]) -> bool:
        tokens = _tokens(values)
        if tokens is None or 2 * self.numel_of[visit.block] * tokens > SMALL_FLOP:
            return False
        return self._fits(visit.index, tokens)

    def _fits(self, turn: int, tokens: int) -> bool:
        """Whether recordings of a pass over so many tokens fit in the budget beside the planned step, beside the
        recordings that there are when the first block asks, and beside those that are promised to other passes: all
        passes of a step ask before the first of them is recorded."""
        spare = self.blocks.spare
        if spare.budget_bytes is None:
            return True
        if (turn, tokens) not in self.fits:
            promised = self.promised | {turn: max(tokens, self.promised.get(turn, 0))}
            made = spare.held["graphs"] + spare.held["static memory"]
            to_come = sum(map(self.needs, promised.values())) - made
            found = spare.has(max(self.needs(tokens), to_come) + spare.workspace_bytes)
            self.fits[turn, tokens] = found
            self.promised = promised if found else self.promised
        return self.fits[turn, tokens]

    def first_run(self, visit: Visit, values: list[Any]) -> Any:
        """The output of a block, and what it wrote into mappings."""
        here = (visit.index, visit.block)
        self.repeats = self.repeats or here in self.visited
        self.visited.add(here)
        if not visit.is_plain:
            return visit._run(values)
        if self.repeats or visit.block in self.hooked or not self._is_small(visit, values):
            return visit.run(values), []

        def keep(static: list[Any]) -> BlockGraph:
            return visit.graph_of(static, lambda call: self.run_whole(visit.block, call))

        kept: dict[str, Any]
        kept = {} if self.kept is None else {"keep": keep, "has_room": lambda: self.kept.has_room(_tokens(values) or 0)}
        return self.blocks.forward(visit.index, visit.block, values, self._addresses(visit), visit.run, **kept), []

    # -- reverse ---------------------------------------------------------------------------------------------------

    def front_of(self, sink: Sink) -> Any:
        """The sink itself, or UnitGradients in front of it."""
        return sink if sink.by_factors or self.repeats else self.gathered.in_front_of(sink)

    def takes(self, visit: Visit, sink: Sink) -> bool:
        """Whether `reverse` is to be called for this visit."""
        kind = type(sink)
        if kind not in self.takes_graphs:
            self.takes_graphs[kind] = isinstance(sink, Recordable)  # takes longer than a launch
        if (
            visit.block in self.hooked
            or self.repeats
            or visit.has_graph
            or not visit.is_plain
            or not self.takes_graphs[kind]
        ):
            return False
        if visit.block not in self.reached:
            self._reaching = self.reached[visit.block] = set()
            return False
        self._reaching = None
        inside = self.reached[visit.block] <= {id(param) for param in self.own[visit.block]}
        return inside and self._is_small(visit, visit.values)

    def reverse(
        self,
        visit: Visit,
        sink: Any,
        run_again: RunAgain,
        stored: dict[int, torch.Tensor],
        complete: Callable[[nn.Parameter], None],
    ) -> None:
        """The backward pass of the visit. stored: by id, the weights of the block's parameters; complete: called after
        something was added to param.grad."""
        block, units = visit.block, self.units_of[visit.block]
        state = sink.state(units)
        depends_on, mark = None if state is None else (self._addresses(visit), state), sink.mark()
        noted = mark

        def differentiate(make: Callable[[], BlockGraph], grads: list[Any], keep: bool) -> tuple[list[Any], list[Any]]:
            nonlocal noted
            sink.rewind(mark)  # called twice when it is captured
            self._offering = self.offers[block, depends_on] = []
            try:
                found = make().gradients(grads, self.own[block], keep)
            finally:
                self._offering = None
            noted = sink.mark()
            return found

        def run(values: list[Any], grads: list[Any]) -> tuple[list[Any], list[Any]]:
            return differentiate(lambda: visit.graph_of(values, lambda call: run_again(block, call)), grads, False)

        def run_kept(graph: BlockGraph, grads: list[Any]) -> tuple[list[Any], list[Any]]:
            return differentiate(lambda: graph, grads, True)

        grads, memory = visit.take_output_grads(), sink.memory(units)
        found, replayed = self.blocks.reverse(
            visit.index, block, visit.values, grads, depends_on, run, memory, run_kept
        )
        if replayed:
            sink.replayed([(tensor, stored[id(tensor.param)]) for tensor in self.offers[block, depends_on]])
        else:
            sink.rewind(noted)  # the second run, which is captured, may have been aborted
        for param, grad in zip(self.own[block], found[1], strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad
                complete(param)
        for origin, grad in zip(visit.origins.values(), found[0], strict=True):
            if grad is not None:
                below = isinstance(origin, tuple) and origin[0].block == block - 1  # used before it is overwritten
                pass_on(origin, grad if below or not self.blocks.is_static(grad) else grad.clone())

    def _addresses(self, visit: Visit) -> tuple[int, ...]:
        """The addresses of the weights of its block."""
        return tuple([param.data_ptr() for param in self.parameters[visit.block]])

    def hand_over(self, sink: Sink, found: list[tuple[FlatTensor, torch.Tensor, torch.Tensor]]) -> bool:
        """Hands gradients of vectors (tensor, weights, gradient) to the sink; False: it cannot be recorded, and nothing
        was done. Those that recordings have written are at fixed addresses, so their updates are one launch. A sink
        that takes runs gets adjacent ones together."""
        if sink is not vars(self).get("gathered"):
            return False
        if self.gathered.hands_over_runs:
            grads = {tensor.start: grad for tensor, _, grad in found}
            takes_runs: Any = self.gathered.sink
            for adjacent in runs_of([tensor for tensor, _, _ in found]):
                each = [grads[tensor.start] for tensor in adjacent]
                takes_runs.run_of_gradients(adjacent, each, torch.cat([grad.flatten() for grad in each]))
            return True
        how = self.gathered.sink.update_key
        if how is None:
            return False
        fixed = [one for one in found if self.blocks.is_static(one[2])]

        def run() -> None:
            for tensor, w, grad in fixed:
                sink.gradient(tensor, w, grad)

        where = tuple([(tensor.start, w.data_ptr(), grad.data_ptr()) for tensor, w, grad in fixed])
        if fixed and self.blocks.update(("vectors", where, how), run):
            self.gathered.sink.updated([tensor for tensor, _, _ in fixed])
        for tensor, w, grad in found:
            if not self.blocks.is_static(grad):
                sink.gradient(tensor, w, grad)
        return True

    def note_gradient(self, param: nn.Parameter) -> None:
        """Autograd has given the parameter a gradient, in an eager backward pass."""
        if self._reaching is not None:
            self._reaching.add(id(param))

    def note_offer(self, tensor: FlatTensor) -> None:
        """The sink has accepted a product."""
        if self._offering is not None:
            self._offering.append(tensor)

    def block_done(self) -> None:
        """The backward pass of all visits of a block is done."""
        self._reaching = None

    def leave(self) -> None:
        """The step is over, also after an error."""
        self._reaching = self._offering = None
        self.visited.clear()
        if "gathered" in vars(self):
            self.gathered.leave()


def _tokens(values: list[Any]) -> int | None:
    """Tokens among the inputs of a block; None if no input is a hidden state."""
    hidden = next((v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()), None)
    return None if hidden is None else hidden.numel() // hidden.shape[-1]
