"""What a forward pass keeps so that its blocks can be differentiated one at a time.

Autograd would differentiate the whole model at once and keep every activation for it. Here the graph is cut at every
block. In the forward pass a block runs without a graph; `activations` says what is kept until the backward pass:

    block    the block's inputs, on the device; the block is recomputed in the backward pass
    host     the same, but the inputs wait in host memory (activation_store.py)
    none     the block's own graph: no recomputation, all activations in memory
    auto     the graphs of the last blocks, as many as fit, and the inputs of the others, as in "block"
             (kept_blocks.py); small blocks run as CUDA graphs (recorded.py), which keep activations where there is room

or, for compiled blocks (compiled.py), a graph of the block that holds only its inputs. Small compiled blocks are
visited like any others, with the compiled function in place of their forward (`through`): CUDA graphs record them.

A block's outputs are passed on as new leaves. So the operations between two blocks (usually none: the next block gets
the same tensor) form a small graph of their own, as do the embedding before the first block and the norm after the
last. The backward pass of a block takes the gradients of its outputs, and adds the gradients of its inputs to the
outputs that they came from. All micro-batches can pass a block, in any order, before the block below is differentiated.

Some models pass tensors between blocks in a mapping that all blocks share (Gemma 3n and 4: keys and values that later
blocks reuse). Its entries are inputs of every block, and what a block writes into it are outputs (shared_objects.py).

A block that draws random numbers (dropout) restores the generator's state of the first run for its recomputation.
"""

import math
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import TensorWeakRef

from keyhole.errors import UserError
from keyhole.model.backward.activation_store import ActivationStore, HostActivation
from keyhole.model.backward.block_graph import BlockGraph
from keyhole.model.backward.compiled import Compiled, Saved
from keyhole.model.backward.shared_objects import (
    KNOWN,
    MappingPlace,
    copied,
    emptied,
    held_tensors,
    refuse_new_tensors,
)

ACTIVATIONS = ("none", "block", "host", "auto")
DEPTH = 32  # of modules within modules
Origin = tuple["Visit", int] | torch.Tensor
"""Where an input came from: an output of a block, by its index among the outputs, or a graph between blocks."""


class Visit:
    """One pass through one block."""

    def __init__(self, tape: "Tape", block: int, module: nn.Module, forward: Callable, index: int) -> None:
        self.block, self.module, self.forward, self.index = block, module, forward, index
        self.store, self.compiled = tape.store, tape.compiled
        self.run_first, self.through, self.may_draw = tape.first_run, tape.through, tape.may_draw
        self.has_graph = block >= tape.first_kept or tape.compiled is not None
        self.saved: Saved | None = None
        self.origins: dict[int, Origin] = {}  # of the inputs that need a gradient, by their index among the inputs
        self.outputs: list[TensorWeakRef] = []  # as the model received them; weak, so the model may drop them
        self.graph: list[GradientEdge | None] = []  # their gradient edges, if the graph is kept; edges hold no tensor
        self.random: Any = None

    def enter(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the block for the first time; returns its output, detached."""
        shared = [x for x in (*args, *kwargs.values()) if isinstance(x, MutableMapping)]
        self.empty_mappings = [emptied(mapping) for mapping in shared]
        if shared and (self.compiled is not None or self.through is not None):
            raise UserError("compile: blocks of this model hand tensors to each other in a mapping; set compile=false")
        if shared:
            place = {id(mapping): MappingPlace(i) for i, mapping in enumerate(shared)}
            args = tuple(place.get(id(x), x) for x in args)
            kwargs = {name: place.get(id(x), x) for name, x in kwargs.items()}
        values, self.spec = tree_flatten((args, kwargs, [dict(mapping) for mapping in shared]))
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self.origins[i] = getattr(value, "keyhole_origin", value)
        if self.may_draw and any(part.training for part in self.module.modules()):
            self.random = _random_state(_device_of(values))
        objects = [value for value in values if not isinstance(value, KNOWN)]
        before = held_tensors(objects)
        if self.has_graph:
            output, written = self._leave(self._with_graph(values))
        else:
            with torch.no_grad():
                output = self._run(values) if self.run_first is None else self.run_first(self, values)
            self.values = [self.store.put(v.detach()) if i in self.origins else v for i, v in enumerate(values)]
            output, written = self._leave(output)
        for mapping, new in zip(shared, written, strict=True):
            mapping.update(new)
        if objects:
            refuse_new_tensors(objects, before)
        return output

    @property
    def is_plain(self) -> bool:
        """Whether the block is a function of its inputs and weights: no mapping, no random numbers."""
        return not self.empty_mappings and self.random is None

    def first_run(self, values: list[Any]) -> tuple[Any, list[dict[Any, Any]]]:
        """The output of the block, and what it wrote into its mappings."""
        return (self.run(values), []) if self.is_plain else self._run(values)

    def run(self, values: list[Any]) -> Any:
        """The output of a plain visit. Compiled code differs with and without a graph, so it always runs with one."""
        if self.through is None:
            return self._run(values)[0]
        output = self.graph_of(values, lambda call: call()).output
        return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output)

    def _run(self, values: list[Any]) -> tuple[Any, list[dict[Any, Any]]]:
        """The block's output, and what it wrote into its mappings, of which it gets copies."""
        args, kwargs, entries = tree_unflatten(values, self.spec)
        copies = [copied(empty) for empty in self.empty_mappings]
        for mapping, entry in zip(copies, entries, strict=True):
            mapping.update(entry)
        args = [copies[x.index] if isinstance(x, MappingPlace) else x for x in args]
        kwargs = {name: copies[x.index] if isinstance(x, MappingPlace) else x for name, x in kwargs.items()}
        if self.through is not None:
            args, kwargs = tree_map(_fresh, (tuple(args), kwargs))
            return self.through(self.module, args, kwargs), []
        output = self.forward(*args, **kwargs)
        pairs = zip(copies, entries, strict=True)
        return output, [{k: v for k, v in after.items() if v is not before.get(k)} for after, before in pairs]

    def _with_graph(self, values: list[Any]) -> Any:
        anchor = torch.zeros((), requires_grad=True)
        values = [
            _Entrance.apply(anchor, v.detach(), self, i) if i in self.origins else v for i, v in enumerate(values)
        ]
        if self.compiled is None:
            return self._run(values)
        args, kwargs, _ = tree_unflatten(values, self.spec)
        self.saved = Saved(self.module, [values[i] for i in self.origins], self.store)
        return self.compiled(self.module, args, kwargs, self.saved), []

    def _leave(self, output: Any) -> Any:
        values, spec = tree_flatten(output)
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                leaf: Any
                values[i] = leaf = value.detach().requires_grad_()
                leaf.keyhole_origin = (self, len(self.outputs))
                self.outputs.append(TensorWeakRef(leaf))
                if self.has_graph:
                    self.graph.append(get_gradient_edge(value) if value.requires_grad else None)
        self.restart()
        return tree_unflatten(values, spec)

    def restart(self) -> None:
        """Drops gradients, before another backward pass."""
        self.output_grads: list[torch.Tensor | None] = [None] * len(self.outputs)
        self.held: list[torch.Tensor | None] = [None] * len(self.outputs)  # gradients of outputs that may be gone
        for ref in self.outputs:
            if (leaf := ref()) is not None:
                leaf.grad = None

    def hold_grads(self) -> None:
        """Holds the gradients that the outputs have now, so that the graph behind the last block, which holds the
        outputs, may be freed."""
        self.held = [None if (leaf := ref()) is None else leaf.grad for ref in self.outputs]

    def add_grad(self, output: int, grad: torch.Tensor) -> None:
        """Adds to the gradient of an output."""
        before = self.output_grads[output]
        self.output_grads[output] = grad if before is None else before + grad

    def take_output_grads(self) -> list[torch.Tensor | None]:
        """Returns and drops the gradients of the outputs."""
        for i, ref in enumerate(self.outputs):
            leaf = ref()
            if (grad := self.held[i] if leaf is None else leaf.grad) is not None:
                self.add_grad(i, grad)
        grads, self.output_grads, self.held = self.output_grads, [], []
        return grads

    def _call(self, inputs: list[Any]) -> Any:
        with torch.enable_grad(), _replayed(self.random):
            return self._run(inputs)

    def prefetch(self) -> None:
        """Starts the H2D copies of inputs in host memory."""
        values = self.saved.on_host if self.saved is not None else [] if self.has_graph else self.values
        for value in values:
            if isinstance(value, HostActivation):
                self.store.prefetch(value)

    def graph_of(self, values: list[Any], run_again: Callable[[Callable], Any]) -> BlockGraph:
        """For a plain visit: the graph of another run, with leaves for its inputs in the order of `origins`. (`reverse`
        makes such a graph for any visit, and differentiates it through .grad.)"""
        inputs = {i: values[i].data.requires_grad_() for i in self.origins}
        again = run_again(lambda: self._call([inputs.get(i, v) for i, v in enumerate(values)]))
        return BlockGraph(list(inputs.values()), again[0])

    def reverse(self, grads: list[Any], run_again: Callable[[Callable[[], Any]], Any], last: bool) -> None:
        """The backward pass of the block, whose parameters are bound, from the gradients of its outputs.
        run_again(call) recomputes the forward (recompute.py). last: this visit needs no further backward pass."""
        inputs: dict[int, torch.Tensor] = {}
        outputs: list[Any] = [*self.graph]
        if not self.has_graph:
            values = [self.store.get(v, last) if isinstance(v, HostActivation) else v for v in self.values]
            if all(grad is None for grad in grads):  # nothing that is differentiated depends on this visit
                return
            inputs = {i: values[i].detach().requires_grad_() for i in self.origins}
            again = run_again(lambda: self._call([inputs.get(i, v) for i, v in enumerate(values)]))
            outputs = [v for v in tree_flatten(again)[0] if isinstance(v, torch.Tensor) and v.is_floating_point()]
            del again, values
        if self.saved is not None:
            self.saved.last = last
        edges: list[Any] = outputs if self.has_graph else [y if y.requires_grad else None for y in outputs]
        pairs = [(y, g) for y, g in zip(edges, grads, strict=True) if y is not None and g is not None]
        self.arrived: dict[int, torch.Tensor] = {}
        if pairs:
            ends, of_ends = zip(*pairs, strict=True)
            torch.autograd.backward(ends, of_ends, retain_graph=self.has_graph and not last)
            del ends, of_ends
        del outputs, edges, pairs
        grads.clear()
        for i, origin in self.origins.items():
            grad = self.arrived.pop(i, None) if self.has_graph else inputs[i].grad
            if grad is not None:
                pass_on(origin, grad)


class _Entrance(torch.autograd.Function):
    """Passes a tensor into a graph that does not keep it, and stores its gradient in the visit."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, visit: Visit, place: int) -> torch.Tensor:
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


class Tape:
    """The visits of all passes of one forward, in order. A stop is a block with the visits of every pass."""

    def __init__(
        self,
        activations: str,
        store: ActivationStore,
        compiled: Compiled | None = None,
        first_run: Callable[[Visit, list[Any]], Any] | None = None,
        first_kept: float = math.inf,
        through: Callable[[nn.Module, tuple, dict[str, Any]], Any] | None = None,
        may_draw: bool = True,
    ) -> None:
        self.store, self.compiled, self.through = store, compiled, through
        self.may_draw = may_draw  # False: no module is in training mode, so no block draws random numbers
        self.first_kept = 0 if activations == "none" else first_kept  # this block and later ones keep their graphs
        self.first_run = first_run  # replaces Visit._run
        self.stops: list[dict[int, Visit]] = []

    @contextmanager
    def recording(self, blocks: list[nn.Module], current_pass: Callable[[], int]) -> Iterator[None]:
        """A context in which every call of a block is recorded."""
        before = [block.__dict__.get("forward") for block in blocks]
        for i, block in enumerate(blocks):
            block.forward = self._recorded(i, block, block.forward, current_pass)
        try:
            yield
        finally:
            for block, forward in zip(blocks, before, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward

    def _recorded(self, i: int, block: nn.Module, forward: Callable, current_pass: Callable[[], int]) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            index = current_pass()
            visit = Visit(self, i, block, forward, index)
            stop = self.stops[-1] if self.stops else {}
            if not stop or index in stop or next(iter(stop.values())).block != i:
                self.stops.append(stop := {})
            stop[index] = visit
            return visit.enter(args, kwargs)

        return call

    @property
    def uses_graphs_between_blocks(self) -> bool:
        """Whether a block other than the first has inputs that were computed outside of blocks."""
        visits = (visit for stop in self.stops[1:] for visit in stop.values())
        return any(isinstance(origin, torch.Tensor) for visit in visits for origin in visit.origins.values())

    def restart(self) -> None:
        """Drops all gradients, before another backward pass."""
        for stop in self.stops:
            for visit in stop.values():
                visit.restart()

    def hold_grads(self, index: int) -> None:
        """Every visit of this pass holds the gradients that its outputs have now."""
        for stop in self.stops:
            if index in stop:
                stop[index].hold_grads()


def is_training(module: nn.Module) -> bool:
    """Whether any module inside is in training mode. Looked up for every step, because modules may be added; level by
    level, which takes a tenth of the time of `modules()` (100 us for a Llama-7B)."""
    level = [module]
    for _ in range(DEPTH):
        if any([part.training for part in level]):
            return True
        level = [below for part in level if part._modules for below in part._modules.values() if below is not None]
        if not level:
            return False
    return any(part.training for part in module.modules())  # a module that holds one that holds it


def _fresh(value: Any) -> Any:
    """The tensor as one that is no view: compiled code is compiled again for views of another shape of tensor."""
    return value if not isinstance(value, torch.Tensor) or value.requires_grad else value.data


def _device_of(values: list[Any]) -> torch.device:
    return next(v.device for v in values if isinstance(v, torch.Tensor))


def _random_state(device: torch.device) -> tuple[torch.device, torch.Tensor, torch.Tensor | None]:
    return device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _replayed(state: Any) -> Iterator[None]:
    """A context in which the generators have an earlier state; afterwards they continue from their state now."""
    if state is None:
        yield
        return
    device, cpu, cuda = state
    with torch.random.fork_rng(devices=[device] if cuda is not None else []):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield
