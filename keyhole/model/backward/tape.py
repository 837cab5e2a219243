"""What a forward pass leaves behind so that its blocks can be differentiated one at a time, in any company.

Autograd would walk back through the whole model in one go and keep every activation for it. Here the graph is cut at
every block. In the forward pass a block runs without a graph; what is kept is what went in (`keep`):

    block    the block's inputs stay on the device; the block is run again when its turn comes in reverse
    host     the same, with the inputs in host memory meanwhile (activation_store.py)
    none     the block's own graph: no second run, all activations in memory

or, where blocks are compiled (compiled.py), a graph of the block that holds no more than its inputs.

A block's outputs are handed on as fresh leaves, so what lies between two blocks (usually nothing: the next block gets
that very tensor) is a little graph of its own, as are the embedding before the first block and the norm after the last.
Reverse is then: gradients of a block's outputs in, gradients of its inputs out, added to the outputs they came from.
Passes may come in any order: all micro-batches can go through a block before the one below it is looked at.

A block that draws random numbers (dropout) starts its second run from the generator's state of the first.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import TensorWeakRef

from keyhole.model.backward.activation_store import Keeper, Kept
from keyhole.model.backward.compiled import Compiled, Saved

KEEPS = ("none", "block", "host")
Origin = tuple["Visit", int] | torch.Tensor


class Visit:
    """One pass through one block."""

    def __init__(self, tape: "Tape", block: int, module: nn.Module, forward: Callable) -> None:
        self.block, self.module, self.forward = block, module, forward
        self.keeper, self.compiled = tape.keeper, tape.compiled
        self.has_graph = tape.keep == "none" or tape.compiled is not None
        self.saved: Saved | None = None
        self.origins: dict[int, Origin] = {}  # of the inputs that want a gradient, by their place among the inputs
        self.outputs: list[TensorWeakRef] = []  # as the model got them; those it dropped are gone
        self.graph: list[GradientEdge | None] = []  # where their graph begins, if it is kept: edges hold no tensor
        self.random: Any = None

    def enter(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the block for the first time; returns its output, cut off."""
        values, self.spec = tree_flatten((args, kwargs))
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self.origins[i] = getattr(value, "keyhole_origin", value)
        if self.module.training:
            self.random = _random_state(_device_of(values))
        if self.has_graph:
            return self._leave(self._with_graph(values))
        with torch.no_grad():
            output = self.forward(*args, **kwargs)
        self.values = [self.keeper.put(v.detach()) if i in self.origins else v for i, v in enumerate(values)]
        return self._leave(output)

    def _with_graph(self, values: list[Any]) -> Any:
        anchor = torch.zeros((), requires_grad=True)
        values = [
            _Entrance.apply(anchor, v.detach(), self, i) if i in self.origins else v for i, v in enumerate(values)
        ]
        args, kwargs = tree_unflatten(values, self.spec)
        if self.compiled is None:
            return self.forward(*args, **kwargs)
        self.saved = Saved(self.module, [values[i] for i in self.origins], self.keeper)
        return self.compiled(self.module, args, kwargs, self.saved)

    def _leave(self, output: Any) -> Any:
        values, spec = tree_flatten(output)
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[i] = leaf = value.detach().requires_grad_()
                leaf.keyhole_origin = (self, len(self.outputs))
                self.outputs.append(TensorWeakRef(leaf))
                if self.has_graph:
                    self.graph.append(get_gradient_edge(value) if value.requires_grad else None)
        self.restart()
        return tree_unflatten(values, spec)

    def restart(self) -> None:
        """Forgets gradients, before another reverse."""
        self.given: list[torch.Tensor | None] = [None] * len(self.outputs)
        for ref in self.outputs:
            if (leaf := ref()) is not None:
                leaf.grad = None

    def give(self, output: int, grad: torch.Tensor) -> None:
        """Adds to the gradient of an output."""
        self.given[output] = grad if self.given[output] is None else self.given[output] + grad

    def _output_grads(self) -> list[torch.Tensor | None]:
        for i, ref in enumerate(self.outputs):
            leaf = ref()
            if leaf is not None and leaf.grad is not None:
                self.give(i, leaf.grad)
        return self.given

    def _call(self, inputs: list[Any]) -> Any:
        args, kwargs = tree_unflatten(inputs, self.spec)
        with torch.enable_grad(), _replayed(self.random):
            return self.forward(*args, **kwargs)

    def prefetch(self) -> None:
        """Starts to bring back what was put away."""
        values = self.saved.kept if self.saved is not None else [] if self.has_graph else self.values
        for value in values:
            if isinstance(value, Kept):
                self.keeper.prefetch(value)

    def reverse(self, run_again: Callable[[Callable[[], Any]], Any], last: bool) -> None:
        """Differentiates the block, its weights being at hand. run_again(call) runs the forward once more, in whatever
        dress it should have. last: nobody will reverse this visit again."""
        inputs, outputs = {}, self.graph
        if not self.has_graph:
            values = [self.keeper.get(v, last) if isinstance(v, Kept) else v for v in self.values]
            inputs = {i: values[i].detach().requires_grad_() for i in self.origins}
            again = run_again(lambda: self._call([inputs.get(i, v) for i, v in enumerate(values)]))
            outputs = [v for v in tree_flatten(again)[0] if isinstance(v, torch.Tensor) and v.is_floating_point()]
            del again, values
        if self.saved is not None:
            self.saved.last = last
        edges = outputs if self.has_graph else [y if y.requires_grad else None for y in outputs]
        grads = self._output_grads()
        pairs = [(y, g) for y, g in zip(edges, grads, strict=True) if y is not None and g is not None]
        self.given, self.arrived = [], {}
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True), retain_graph=self.has_graph and not last)
        del outputs, edges, pairs
        for i, origin in self.origins.items():
            grad = self.arrived.pop(i, None) if self.has_graph else inputs[i].grad
            if grad is not None:
                pass_on(origin, grad)


class _Entrance(torch.autograd.Function):
    """Lets a tensor into a graph that does not keep it, and takes its gradient at the end of the way back."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, visit: Visit, place: int) -> torch.Tensor:
        ctx.visit, ctx.place = weakref.ref(visit), place  # the visit holds the graph, and so this node
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.visit().arrived[ctx.place] = grad
        return None, None, None, None


def pass_on(origin: Origin, grad: torch.Tensor) -> None:
    """Gives a gradient to where the tensor came from: a block's output, or a graph between blocks."""
    if isinstance(origin, tuple):
        visit, output = origin
        visit.give(output, grad)
    else:
        torch.autograd.backward(origin, grad, retain_graph=True)


class Tape:
    """The visits of all passes of one forward, in their order. A stop is a block with the visits of every pass."""

    def __init__(self, keep: str, keeper: Keeper, compiled: Compiled | None = None) -> None:
        self.keep, self.keeper, self.compiled = keep, keeper, compiled
        self.stops: list[dict[int, Visit]] = []

    @contextmanager
    def recording(self, blocks: list[nn.Module], current_pass: Callable[[], int]) -> Iterator[None]:
        """Has every call of a block recorded."""
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
            visit, index = Visit(self, i, block, forward), current_pass()
            last = self.stops[-1] if self.stops else {}
            if not last or index in last or next(iter(last.values())).block != i:
                self.stops.append(last := {})
            last[index] = visit
            return visit.enter(args, kwargs)

        return call

    def restart(self) -> None:
        """Forgets all gradients, before another reverse."""
        for stop in self.stops:
            for visit in stop.values():
                visit.restart()


def _device_of(values: list[Any]) -> torch.device:
    return next(v.device for v in values if isinstance(v, torch.Tensor))


def _random_state(device: torch.device) -> tuple[torch.device, torch.Tensor, torch.Tensor | None]:
    return device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _replayed(state: Any) -> Iterator[None]:
    """Runs with the generators as they were; they are put back to where they are now afterwards."""
    if state is None:
        yield
        return
    device, cpu, cuda = state
    with torch.random.fork_rng(devices=[device] if cuda is not None else []):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield
