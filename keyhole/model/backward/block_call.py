"""One call of a block as a function of a flat list of values, plain or compiled, and the autograd graph of one run.

A block may get objects that all blocks share, in which it leaves tensors for later ones:

    a mapping         its entries are inputs of a block, and what the block writes into it are outputs (tape.py). A
                      block gets a copy, in every run: with the class and attributes, and the entries of its inputs
    another object    tensors in its attributes would pass the cut between two blocks unseen, and lose their gradients;
                      a block that leaves some there is refused

The gain of torch.compile is explained in model/forward/blocks.py. The compiled function is

    checkpoint(block.forward)

so the compiled backward pass contains the recomputation too, without the operations that no gradient needs. If all
activations are kept (activations: none) the compiled function is block.forward, and its activations are saved. The
block is an argument and its weights are inputs, so that all blocks of one kind share the code. The graph between
forward and backward holds its inputs and parameters. Saved tensors go through `pack` and `unpack`: a parameter is saved
by reference, since its memory may move until then (streamed weights), and an input may wait in host memory
(activation_store.py).

Fewer kernels are still launched by Python and autograd, some twenty per block: with short batches the host is the
bottleneck again. So small blocks are recorded as CUDA graphs (recorded.py), as those that are not compiled, from the
same compiled function; the first replay is compared with an ordinary run to the last bit.
Its linear layers offer their gradients by operations of ours (recompute.py).
"""

import copy
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from keyhole.errors import UserError
from keyhole.machine.held import Changes
from keyhole.machine.settings import compiler
from keyhole.model.backward.activation_store import HostActivation
from keyhole.model.backward.recompute import linears_offer
from keyhole.model.forward.blocks import prepare_compiling

Values = list[Any]
Result = tuple[Any, list[dict[Any, Any]]]  # What a block returns, and what it writes into each of its mappings.
Gradients = dict[int, torch.Tensor]  # Of inputs, by their place among the values.


@dataclass(frozen=True)
class _Place:
    """Stands for a mapping among the arguments of a block."""

    index: int


# Arguments of a block that no block can leave a tensor in.
KNOWN = torch.Tensor | None | bool | int | float | str | torch.dtype | torch.device | _Place


class BlockCall:
    """A call of a block with these arguments. `values` are its inputs: tensors and whatever else it gets."""

    def __init__(self, forward: Callable, args: tuple, kwargs: dict[str, object]) -> None:
        self.forward = forward
        self.on_host: list[HostActivation] = []  # what waits in host memory for the backward pass
        self.mappings: Values = [x for x in (*args, *kwargs.values()) if isinstance(x, MutableMapping)]
        entries = [dict(mapping) for mapping in self.mappings]
        self.empty = [copy.copy(mapping) for mapping in self.mappings]
        for mapping in self.empty:
            mapping.clear()
        if list(map(len, self.mappings)) != list(map(len, entries)):
            raise refused(self.mappings)  # a copy shares its entries with the mapping
        place = {id(mapping): _Place(i) for i, mapping in enumerate(self.mappings)}
        args = tuple(place.get(id(x), x) for x in args)
        kwargs = {name: place.get(id(x), x) for name, x in kwargs.items()}
        self.values, self.spec = tree_flatten((args, kwargs, entries))

    def run(self, values: Values) -> Result:
        """The block as a function of its inputs; it gets copies of its mappings."""
        args, kwargs, entries = tree_unflatten(values, self.spec)
        copies = [copy.copy(empty) for empty in self.empty]
        for mapping, entry in zip(copies, entries, strict=True):
            mapping.update(entry)
        args = [copies[x.index] if isinstance(x, _Place) else x for x in args]
        kwargs = {name: copies[x.index] if isinstance(x, _Place) else x for name, x in kwargs.items()}
        output = self.forward(*args, **kwargs)
        pairs = zip(copies, entries, strict=True)
        return output, [{k: v for k, v in after.items() if v is not before.get(k)} for after, before in pairs]

    def finish(self, result: Result, objects: Values, before: set[int]) -> Any:
        """After the first run: writes into the caller's mappings, which go. Returns the output. UserError if the block
        has left tensors in other objects, which held `before` when it began."""
        output, written = result
        for mapping, new in zip(self.mappings, written, strict=True):
            mapping.update(new)
        self.mappings = []
        if objects and not before.issuperset(held_tensors(objects)):
            raise refused(objects)
        return output


def refused(objects: Values) -> UserError:
    kinds = ", ".join(sorted({type(value).__name__ for value in objects}))
    return UserError(
        f"model: its blocks hand tensors to each other in an object ({kinds}) that keyhole cannot differentiate "
        "through, block by block; use zo, or a baseline (adamw, sgd), which differentiates the model as a whole"
    )


def held_tensors(objects: Values) -> set[int]:
    """Ids of tensors that may have gradients (not masks or positions) in the attributes of these objects, and in lists
    and dicts there."""
    leaves = [leaf for value in objects if hasattr(value, "__dict__") for leaf in tree_leaves(dict(vars(value)))]
    return {id(x) for x in leaves if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())}


def _forward(block: nn.Module, keep: bool, args: tuple, kwargs: dict[str, Any]) -> Any:
    run = type(block).forward
    return run(block, *args, **kwargs) if keep else checkpoint(run, block, *args, use_reentrant=False, **kwargs)


def _offering_forward(block: nn.Module, keep: bool, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The same under another name: torch caches compiled code per function, and must not confuse the two."""
    return _forward(block, keep, args, kwargs)


Store = Callable[[torch.Tensor], torch.Tensor | HostActivation]


class Compiled:
    """Blocks compiled; one instance for all blocks of a model. keep: no recomputation. offer: the device on which
    linear layers offer their gradients; None if they do not."""

    def __init__(self, backend: str, changes: Changes, keep: bool = False) -> None:
        self.offer: torch.device | None = None
        self.keep = keep
        prepare_compiling(changes)
        changes.set(compiler("torch._functorch", "donated_buffer"), False)  # else no graph could run backward twice
        self.run, self.run_offering = (torch.compile(f, backend=backend) for f in (_forward, _offering_forward))


class CompiledCall(BlockCall):
    """A call of a block, compiled. What its graph saves: parameters by reference, inputs through the store."""

    def __init__(self, compiled: Compiled, block: nn.Module, store: Store, args: tuple, kwargs: Any) -> None:
        super().__init__(block.forward, args, kwargs)
        self.compiled, self.block, self.store = compiled, block, store
        self.params = {p.data_ptr(): p for p in block.parameters()}
        self.inputs: set[int] = set()  # addresses

    def run(self, values: Values) -> Result:
        own = self.compiled
        self.inputs = {x.data_ptr() for x in values if isinstance(x, torch.Tensor) and x.requires_grad}
        # as tensors that are no views: compiled code is compiled again for views of another shape of tensor
        fresh = [v.data if isinstance(v, torch.Tensor) and not v.requires_grad else v for v in values]
        args, kwargs, _ = tree_unflatten(fresh, self.spec)
        with linears_offer(own.offer), torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return (own.run if own.offer is None else own.run_offering)(self.block, own.keep, args, kwargs), []

    def pack(self, x: torch.Tensor) -> torch.Tensor | HostActivation:
        param = self.params.get(x.data_ptr())
        if param is not None and param.shape == x.shape and param.stride() == x.stride():  # not its transpose
            return param
        stored = self.store(x) if x.data_ptr() in self.inputs else x
        if isinstance(stored, HostActivation):
            self.on_host.append(stored)
            return stored
        return x

    def unpack(self, value: torch.Tensor | HostActivation) -> torch.Tensor:
        if isinstance(value, nn.Parameter):
            return value.data
        return value.get() if isinstance(value, HostActivation) else value


ANCHOR = torch.zeros((), requires_grad=True)  # an input of every entrance, so that autograd walks to it; no gradient


class BlockGraph:
    """The autograd graph of one run of a block, cut off from the rest of the model: it begins at entrances, which do
    not keep its inputs, and ends at edges of its floating-point outputs, which hold no tensor."""

    def __init__(self) -> None:
        self.edges: list[GradientEdge | None] = []
        self.arrived: Gradients = {}

    def add_grad(self, place: int, grad: torch.Tensor) -> None:
        self.arrived[place] = grad

    def enter(self, values: Values, places: list[int]) -> Values:
        """The values with those that have gradients in the graph."""
        inside = list(values)
        for i in places:
            inside[i] = enter(values[i], self, i)
        return inside

    def leave(self, result: Result) -> Result:
        """Ends the graph with what the block returns."""
        outputs = [v for v in tree_leaves(result) if isinstance(v, torch.Tensor) and v.is_floating_point()]
        self.edges = [get_gradient_edge(y) if y.requires_grad else None for y in outputs]
        return result

    def backward(
        self, grads: Values, parameters: list[nn.Parameter] | None = None, keep: bool = False
    ) -> tuple[Gradients, Values]:
        """Gradients of the inputs, from those of the outputs. Those of parameters are accumulated, or returned if they
        are asked for (None: there is none). keep: the graph can be used again."""
        ends = [(edge, g) for edge, g in zip(self.edges, grads, strict=True) if edge is not None and g is not None]
        edges, of_edges = [edge for edge, _ in ends], [grad for _, grad in ends]
        of_parameters: Values = [None] * len(parameters or ())
        if edges and parameters is None:
            torch.autograd.backward(edges, of_edges, retain_graph=keep)
        elif edges and parameters is not None:
            wanted = [ANCHOR, *parameters]  # so that gradients reach the entrances
            _, *of_parameters = torch.autograd.grad(edges, wanted, of_edges, allow_unused=True, retain_graph=keep)
        arrived, self.arrived = dict(sorted(self.arrived.items())), {}
        return arrived, of_parameters

    def reaches(self, tensors: set[int]) -> bool:
        """Whether any of these tensors (ids) would get a gradient."""
        seen: set[Any] = {None}
        left: Values = [edge.node for edge in self.edges if edge is not None]
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                if node.name().endswith("AccumulateGrad") and id(node.variable) in tensors:
                    return True
                left += [before for before, _ in node.next_functions]
        return False


def enter(x: torch.Tensor, owner: Any, place: int) -> torch.Tensor:
    """x as the beginning of a graph that does not keep it. Its gradient goes to the owner's `add_grad`."""
    found: torch.Tensor = _Entrance.apply(ANCHOR, x.detach(), weakref.ref(owner), place)  # weak: it may hold the graph
    return found


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, owner: Callable[[], Any], place: int) -> torch.Tensor:
        ctx.owner, ctx.place = owner, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.owner().add_grad(ctx.place, grad)
        return None, None, None, None
