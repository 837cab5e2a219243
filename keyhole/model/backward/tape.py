"""What a forward pass keeps so that its blocks can be differentiated one at a time.

Autograd would differentiate the whole model at once and keep every activation for it. Here the graph is cut at every
block. Each visit of a block by a pass is one of three:

    KeptInputs    the block runs without a graph; its inputs are kept, on the device or in host memory
                  (activation_store.py), and the block is recomputed in the backward pass. Small blocks run as CUDA
                  graphs (recorded.py)
    KeptGraph     the block's own graph is kept: no recomputation, all activations in memory
    CompiledVisit the same through torch.compile (compiled.py): a graph that holds only the block's inputs

`Keeping` decides which, once per step, from the setting `activations`:

    block    KeptInputs on the device          host    KeptInputs in host memory          none    KeptGraph
    auto     KeptGraph for the last blocks, as many as fit, and for the others as "block"

A block's outputs are passed on as new leaves. So the operations between two blocks (usually none: the next block gets
the same tensor) form a small graph of their own, as do the embedding before the first block and the norm after the
last. The backward pass of a block takes the gradients of its outputs, and adds the gradients of its inputs to the
outputs that they came from. All micro-batches can pass a block, in any order, before the block below is differentiated.

Some models pass tensors between blocks in a mapping that all blocks share (Gemma 3n and 4: keys and values that later
blocks reuse). Its entries are inputs of every block, and what a block writes into it are outputs (block_call.py).
A block that draws random numbers (dropout) restores the generator's state of the first run for its recomputation.
"""

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import TensorWeakRef

from keyhole.errors import UserError
from keyhole.model.backward.activation_store import ActivationStore, HostActivation
from keyhole.model.backward.block_call import (
    KNOWN,
    BlockCall,
    BlockGraph,
    Result,
    Values,
    differentiate,
    floats,
    held_tensors,
    with_gradients,
)
from keyhole.model.backward.compiled import Compiled, Saved
from keyhole.model.forward.hooks import replaced_forwards

RunAgain = Callable[[Callable[[], Any]], Any]
# Where an input came from: an output of a block, by its index among the outputs, or a graph between blocks.
Origin = tuple["Visit", int] | torch.Tensor


class Recorded(Protocol):
    """Runs visits as CUDA graphs, if possible (recorded.py)."""

    def first_run(self, visit: "KeptInputs") -> Result: ...

    def reverse(self, visit: "KeptInputs", grads: Values, run_again: RunAgain) -> bool: ...


class Visit:
    """One pass, `index`, through one block, that is about to be called."""

    def __init__(self, keeping: "Keeping", block: int, index: int, module: nn.Module, call: BlockCall) -> None:
        self.keeping, self.block, self.index, self.module, self.call = keeping, block, index, module, call
        self.values, call.values = call.values, []
        wants = {i: v for i, v in enumerate(self.values) if isinstance(v, torch.Tensor) and v.requires_grad}
        self.origins: dict[int, Origin] = {i: getattr(v, "keyhole_origin", v) for i, v in wants.items()}
        self.draws = keeping.may_draw and any(part.training for part in module.modules())
        self.outputs: list[TensorWeakRef] = []  # as the model received them; weak, so the model may drop them

    def enter(self) -> Any:
        """Runs the block for the first time; returns its output, detached."""
        objects = [value for value in self.values if not isinstance(value, KNOWN)]
        before = held_tensors(objects)
        values, spec = tree_flatten(self.first())
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                leaf: Any = value.detach().requires_grad_()
                values[i], leaf.keyhole_origin = leaf, (self, len(self.outputs))
                self.outputs.append(TensorWeakRef(leaf))
        self.restart()
        return self.call.finish(tree_unflatten(values, spec), objects, before)

    @abstractmethod
    def first(self) -> Result:
        """The first run of the block; what the backward pass needs of it is kept."""

    def run(self, values: Values) -> Result:
        """The block as a function of its inputs."""
        return self.call.run(values)

    @abstractmethod
    def reverse(self, grads: Values, run_again: RunAgain, last: bool) -> None:
        """The backward pass of the block, whose parameters are bound, from the gradients of its outputs (it empties
        their list). run_again(call) recomputes the forward (recompute.py). last: there will be no further one."""

    def prefetch(self) -> None:
        """Starts the H2D copies of inputs in host memory."""

    # -- gradients of outputs --------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Drops gradients, before another backward pass."""
        self.output_grads: Values = [None] * len(self.outputs)
        for ref in self.outputs:
            if (leaf := ref()) is not None:
                leaf.grad = None

    def add_grad(self, output: int, grad: torch.Tensor) -> None:
        """Adds to the gradient of an output."""
        before = self.output_grads[output]
        self.output_grads[output] = grad if before is None else before + grad

    def collect(self) -> None:
        """Takes the gradients of the outputs: the graph that follows, which holds the outputs, may be freed."""
        for i, ref in enumerate(self.outputs):
            if (leaf := ref()) is not None and leaf.grad is not None:
                self.add_grad(i, leaf.grad)
                leaf.grad = None

    def take_grads(self) -> Values:
        """Returns and drops the gradients of the outputs."""
        self.collect()
        grads, self.output_grads = self.output_grads, []
        return grads


class KeptInputs(Visit):
    """The block runs without a graph, and is recomputed."""

    random: "tuple[torch.device, torch.Tensor, torch.Tensor | None] | None" = None

    @property
    def is_plain(self) -> bool:
        """Whether the block is a function of its inputs and weights: no mapping, no random numbers."""
        return not self.call.empty and not self.draws

    def first(self) -> Result:
        recorded, store = self.keeping.recorded, self.keeping.store
        if self.draws:
            self.random = _random_state(next(v.device for v in self.values if isinstance(v, torch.Tensor)))
        with torch.no_grad():
            output = self.run_first() if recorded is None else recorded.first_run(self)
        self.values = [store.put(v.detach()) if i in self.origins else v for i, v in enumerate(self.values)]
        return output

    def run_first(self, values: Values | None = None) -> Result:
        """The first run, if it is not replaced. values: instead of its inputs."""
        return self.run(self.values if values is None else values)

    def graph(self, values: Values, run_again: RunAgain) -> BlockGraph:
        """The graph of another run, with leaves for its inputs in the order of `origins`."""
        inputs = {i: values[i].data.requires_grad_() for i in self.origins}

        def call() -> Result:
            with torch.enable_grad(), _replayed(self.random):
                return self.run([inputs.get(i, v) for i, v in enumerate(values)])

        return BlockGraph(list(inputs.values()), run_again(call))

    def prefetch(self) -> None:
        for value in self.values:
            if isinstance(value, HostActivation):
                value.prefetch()

    def reverse(self, grads: Values, run_again: RunAgain, last: bool) -> None:
        if self.keeping.recorded is not None and self.keeping.recorded.reverse(self, grads, run_again):
            return
        values = [v.get(last) if isinstance(v, HostActivation) else v for v in self.values]
        if all(grad is None for grad in grads):  # nothing that is differentiated depends on this visit
            return
        graph = self.graph(values, run_again)
        inputs, ends = graph.inputs, with_gradients(floats(graph.result), grads)
        del values, graph
        grads.clear()
        differentiate(*ends)
        for origin, leaf in zip(self.origins.values(), inputs, strict=True):
            if leaf.grad is not None:
                pass_on(origin, leaf.grad)


class CompiledInputs(KeptInputs):
    """The same with the compiled function of the block, which will be recorded as a CUDA graph."""

    def run(self, values: Values) -> Result:
        assert self.keeping.compiled is not None
        args, kwargs, _ = tree_unflatten([_fresh(value) for value in values], self.call.spec)
        return self.keeping.compiled(self.module, args, kwargs, Saved(self.module)), []

    def run_first(self, values: Values | None = None) -> Result:
        """Compiled code differs with and without a graph, so it always runs with one."""
        output, _ = self.graph(self.values if values is None else values, lambda call: call()).result
        return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output), []


class KeptGraph(Visit):
    """The block's graph is kept, between gradient edges of its outputs (which hold no tensor) and its inputs."""

    def first(self) -> Result:
        anchor = torch.zeros((), requires_grad=True)
        values, self.values = self.values, []
        for i in self.origins:
            values[i] = _Entrance.apply(anchor, values[i].detach(), self, i)
        result = self.run(values)
        self.edges = [get_gradient_edge(y) if y.requires_grad else None for y in floats(result)]
        return result

    def reverse(self, grads: Values, run_again: RunAgain, last: bool) -> None:
        ends, self.arrived = with_gradients(self.edges, grads), dict[int, torch.Tensor]()
        grads.clear()
        differentiate(*ends, keep=not last)
        for i, grad in sorted(self.arrived.items()):
            pass_on(self.origins[i], grad)
        self.arrived.clear()


class CompiledVisit(KeptGraph):
    """The same through the compiled function of the block, whose graph holds only its inputs."""

    def run(self, values: Values) -> Result:
        assert self.keeping.compiled is not None
        self.saved = Saved(self.module, [values[i] for i in self.origins], self.keeping.store)
        args, kwargs, _ = tree_unflatten(values, self.call.spec)
        return self.keeping.compiled(self.module, args, kwargs, self.saved), []

    def prefetch(self) -> None:
        for value in self.saved.on_host:
            value.prefetch()

    def reverse(self, grads: Values, run_again: RunAgain, last: bool) -> None:
        self.saved.last = last
        super().reverse(grads, run_again, last)


class _Entrance(torch.autograd.Function):
    """Passes a tensor into a graph that does not keep it, and stores its gradient in the visit."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, visit: KeptGraph, place: int) -> torch.Tensor:
        ctx.visit, ctx.place = weakref.ref(visit), place  # weak: the visit holds the graph, and so this node
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.visit().arrived[ctx.place] = grad
        return None, None, None, None


def pass_on(origin: Origin, grad: torch.Tensor) -> None:
    """Adds a gradient to the tensor's origin."""
    if isinstance(origin, tuple):
        visit, output = origin
        visit.add_grad(output, grad)
    else:
        torch.autograd.backward(origin, grad, retain_graph=True)


@dataclass
class Keeping:
    """What the visits of a step keep, decided once per step."""

    store: ActivationStore
    first_kept: float = math.inf  # This block and later ones keep their graphs.
    compiled: Compiled | None = None
    recorded: Recorded | None = None  # Blocks are small, and may run as CUDA graphs.
    may_draw: bool = True  # Whether some module is in training mode, and may draw random numbers.

    def visit(self, block: int, index: int, module: nn.Module, call: BlockCall) -> Visit:
        """A visit that keeps what it needs."""
        if self.compiled is None:
            return (KeptGraph if block >= self.first_kept else KeptInputs)(self, block, index, module, call)
        if call.empty:
            raise UserError("compile: blocks of this model hand tensors to each other in a mapping; set compile=false")
        return (CompiledVisit if self.recorded is None else CompiledInputs)(self, block, index, module, call)


class Tape:
    """The visits of all passes of one forward, in order. A stop is a block with the visits of every pass."""

    def __init__(self, keeping: Keeping) -> None:
        self.keeping = keeping
        self.stops: list[dict[int, Visit]] = []

    @contextmanager
    def recording(self, blocks: list[nn.Module], current_pass: Callable[[], int]) -> Iterator[None]:
        """A context in which every call of a block is recorded."""

        def recorded(i: int, block: nn.Module, forward: Callable) -> Callable:
            def call(*args: object, **kwargs: object) -> Any:
                index = current_pass()
                visit = self.keeping.visit(i, index, block, BlockCall(forward, args, kwargs))
                if not self.stops or index in self.stops[-1] or next(iter(self.stops[-1].values())).block != i:
                    self.stops.append({})
                self.stops[-1][index] = visit
                return visit.enter()

            return call

        with replaced_forwards(blocks, [recorded(i, block, block.forward) for i, block in enumerate(blocks)]):
            yield

    def restart(self) -> None:
        """Drops all gradients, before another backward pass."""
        for stop in self.stops:
            for visit in stop.values():
                visit.restart()

    @property
    def uses_graphs_between_blocks(self) -> bool:
        """Whether a block other than the first has inputs that were computed outside of blocks."""
        later = (visit for stop in self.stops[1:] for visit in stop.values())
        return any(isinstance(origin, torch.Tensor) for visit in later for origin in visit.origins.values())


def _fresh(value: object) -> Any:
    """The tensor as one that is no view: compiled code is compiled again for views of another shape of tensor."""
    return value if not isinstance(value, torch.Tensor) or value.requires_grad else value.data


def _random_state(device: torch.device) -> tuple[torch.device, torch.Tensor, torch.Tensor | None]:
    return device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _replayed(state: tuple[torch.device, torch.Tensor, torch.Tensor | None] | None) -> Iterator[None]:
    """A context in which the generators have an earlier state; afterwards they continue from their state now."""
    device, cpu, cuda = state or (None, None, None)
    with torch.random.fork_rng(devices=[] if cuda is None else [device], enabled=state is not None):
        if cpu is not None:
            torch.set_rng_state(cpu)
        if cuda is not None and device is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield
