"""What a forward pass keeps so that its blocks can be differentiated one at a time.

Autograd would differentiate the whole model at once and keep every activation for it. Here the graph is cut at every
block. Each visit of a block by a pass is one of two:

    KeptInputs    the block runs without a graph; its inputs are kept, on the device or in host memory
                  (activation_store.py), and the block is recomputed in the backward pass. Small blocks run as CUDA
                  graphs (recorded.py)
    KeptGraph     the block's own graph is kept: no recomputation, all activations in memory. That of a compiled block
                  (block_call.py) holds only its inputs

`Reverse` decides which, once per step, from the setting `activations`:

    block    KeptInputs on the device          host    KeptInputs in host memory          none    KeptGraph
    auto     KeptGraph for the last blocks, as many as fit, and for the others as "block"

A block's outputs are passed on as beginnings of new graphs. So the operations between two blocks (usually none: the
next block gets the same tensor) form a small graph of their own, as do the embedding before the first block and the
norm after the last. The backward pass of a block takes the gradients of its outputs, and adds the gradients of its
inputs to the outputs that they came from. All micro-batches can pass a block, in any order, before the block below is
differentiated.

Some models pass tensors between blocks in a mapping that all blocks share (Gemma 3n and 4: keys and values that later
blocks reuse). Its entries are inputs of every block, and what a block writes into it are outputs (block_call.py).
A block that draws random numbers (dropout) restores the generator's state of the first run for its recomputation.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from keyhole.errors import UserError
from keyhole.model.backward.activation_store import ActivationStore, HostActivation
from keyhole.model.backward.block_call import (
    KNOWN,
    BlockCall,
    BlockGraph,
    Compiled,
    CompiledCall,
    Gradients,
    Result,
    Values,
    enter,
    held_tensors,
)
from keyhole.model.forward.hooks import replaced_forwards

RunAgain = Callable[[Callable[[], Any]], Any]
# Where an input came from: an output of a block, by its index among the outputs, or a graph between blocks.
Origin = tuple["Visit", int] | GradientEdge


class Visit:
    """One pass, `index`, through one block, that is about to be called."""

    random: tuple[Any, ...] = ()  # the state of the generators before the first run, if it is run again and draws

    def __init__(self, tape: "Tape", block: int, index: int, module: nn.Module, call: BlockCall) -> None:
        self.tape, self.block, self.index, self.call = tape, block, index, call
        self.values, call.values = call.values, []
        wants = {i: v for i, v in enumerate(self.values) if isinstance(v, torch.Tensor) and v.requires_grad}
        self.origins: dict[int, Origin] = {
            i: getattr(v, "keyhole_origin", None) or get_gradient_edge(v) for i, v in wants.items()
        }
        self.draws = tape.may_draw and any(part.training for part in module.modules())
        self.output_grads: dict[int, Any] = {}
        self.outputs = 0  # the number of floating-point ones

    def enter(self) -> Any:
        """Runs the block for the first time; returns its output, from which another graph begins."""
        objects = [value for value in self.values if not isinstance(value, KNOWN)]
        before = held_tensors(objects)
        values, spec = tree_flatten(self.first())
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[i] = enter(value, self, self.outputs)
                values[i].keyhole_origin = self, self.outputs
                self.outputs += 1
        return self.call.finish(tree_unflatten(values, spec), objects, before)

    def graph(self, values: Values, run: RunAgain = lambda call: call()) -> tuple[BlockGraph, Result]:
        """The graph of a run with these values, and what the block returns."""
        graph = BlockGraph()

        def call() -> Result:
            with torch.enable_grad(), _drawn(self.random):
                return self.call.run(graph.enter(values, [*self.origins]))

        return graph, graph.leave(run(call))

    @abstractmethod
    def first(self) -> Result:
        """The first run of the block; what the backward pass needs of it is kept."""

    @abstractmethod
    def reverse(self, grads: Values, run_again: RunAgain, last: bool) -> None:
        """The backward pass of the block, whose parameters are bound, from the gradients of its outputs.
        run_again(call) recomputes the forward (recompute.py). last: there will be no further one."""

    # -- gradients of outputs and inputs -----------------------------------------------------------------------------

    def add_grad(self, output: int, grad: torch.Tensor) -> None:
        """Adds to the gradient of an output."""
        before = _on_device(self.output_grads.get(output))
        self.output_grads[output] = grad if before is None else before + grad

    def take_grads(self) -> Values:
        """Returns and drops the gradients of the outputs."""
        return [_on_device(self.output_grads.pop(output, None)) for output in range(self.outputs)]

    def move_grads(self) -> None:
        """The gradients of the outputs wait in host memory, those of other passes come first."""
        for i, grad in self.output_grads.items():
            if not isinstance(grad, HostActivation):
                self.output_grads[i] = self.tape.store.move(grad)

    def move_inputs_grads(self) -> None:
        """The gradients of its inputs wait there too."""
        for origin in self.origins.values():
            if not isinstance(origin, GradientEdge):
                origin[0].move_grads()

    def prefetch(self) -> None:
        """What the backward pass of this visit needs of host memory is on its way."""
        for waiting in (*self.call.on_host, *self.output_grads.values()):
            if isinstance(waiting, HostActivation):
                waiting.prefetch()

    def pass_on(self, grads: Gradients) -> None:
        """Adds gradients of inputs to what they came from."""
        for i, grad in grads.items():
            origin = self.origins[i]
            if isinstance(origin, GradientEdge):
                torch.autograd.backward(origin, grad, retain_graph=True)
            else:
                visit, output = origin
                visit.add_grad(output, grad)


class KeptInputs(Visit):
    """The block runs without a graph, and is recomputed."""

    def first(self) -> Result:
        recorded, store = self.tape.recorded, self.tape.store
        if self.draws:
            self.random = (torch.get_rng_state(), *get_device_states(*self.values))
        with torch.no_grad():
            output = self.run_first() if recorded is None else recorded.first_run(self)
        waits = {i for i, v in enumerate(self.values) if i in self.origins or hasattr(v, "keyhole_moved")}
        self.values = [store.put(v, self.block) if i in waits else v for i, v in enumerate(self.values)]
        self.call.on_host = [value for value in self.values if isinstance(value, HostActivation)]
        return output

    def run_first(self, values: Values | None = None) -> Result:
        """The first run, if it is not replaced. values: instead of its inputs."""
        values = self.values if values is None else values
        if self.tape.compiled is None:
            return self.call.run(values)
        found: Result = tree_map(_detached, self.graph(values)[1])  # its code differs with and without a graph
        return found

    def reverse(self, grads: Values, run_again: RunAgain, last: bool) -> None:
        recorded = self.tape.recorded
        if recorded is not None and recorded.reverse(self, grads, run_again):
            return
        if any(grad is not None for grad in grads):  # else nothing that is differentiated depends on this visit
            values = [v.get() if isinstance(v, HostActivation) else v for v in self.values]
            graph = self.graph(values, run_again)[0]
            del values
            self.pass_on(graph.backward(grads)[0])


class KeptGraph(Visit):
    """The block's graph is kept."""

    def first(self) -> Result:
        values, self.values = self.values, []
        self.kept, result = self.graph(values)
        return result

    def reverse(self, grads: Values, run_again: RunAgain, last: bool) -> None:
        self.pass_on(self.kept.backward(grads, keep=not last)[0])


class Tape:
    """The visits of all passes of one forward, in order, and what they keep. A stop is a block with the visits of every
    pass. first_kept: this block and later ones keep their graphs; recorded: blocks are small, and may run as CUDA
    graphs (RecordedBlocks); may_draw: some module is in training mode, and may draw random numbers."""

    def __init__(
        self,
        store: ActivationStore,
        first_kept: float = 0,
        compiled: Compiled | None = None,
        recorded: Any = None,
        may_draw: bool = True,
    ) -> None:
        self.store, self.first_kept, self.compiled, self.recorded = store, first_kept, compiled, recorded
        self.may_draw = may_draw
        self.stops: list[dict[int, Visit]] = []

    def visit(self, i: int, index: int, block: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """A pass calls a block."""
        call = BlockCall(forward, args, kwargs)
        if self.compiled is not None:
            call = CompiledCall(self.compiled, block, partial(self.store.put, block=i), args, kwargs)
            if call.empty:
                raise UserError(
                    "compile: blocks of this model hand tensors to each other in a mapping; set compile=false"
                )
        one = (KeptGraph if i >= self.first_kept else KeptInputs)(self, i, index, block, call)
        if not self.stops or index in self.stops[-1] or next(iter(self.stops[-1].values())).block != i:
            self.stops.append({})
        self.stops[-1][index] = one
        return one.enter()

    @contextmanager
    def recording(self, blocks: list[nn.Module], current_pass: Callable[[], int]) -> Iterator[None]:
        """A context in which every call of a block is recorded."""

        def recorded(i: int, block: nn.Module, forward: Callable) -> Callable:
            return lambda *args, **kwargs: self.visit(i, current_pass(), block, forward, args, kwargs)

        with replaced_forwards(blocks, [recorded(i, block, block.forward) for i, block in enumerate(blocks)]):
            yield

    def restart(self) -> None:
        """Drops all gradients, before another backward pass."""
        for stop in self.stops:
            for visit in stop.values():
                visit.output_grads.clear()


def _on_device(grad: Any) -> Any:
    return grad.get(release=True) if isinstance(grad, HostActivation) else grad


def _detached(x: object) -> object:
    return x.detach() if isinstance(x, torch.Tensor) else x


@contextmanager
def _drawn(random: tuple[Any, ...]) -> Iterator[None]:
    """A context in which the generators have an earlier state; afterwards they continue from their state now."""
    with torch.random.fork_rng(random[1]) if random else nullcontext():
        if random:
            torch.set_rng_state(random[0])
            set_device_states(*random[1:])
        yield
