"""One call of a block as a function of a flat list of values, and the autograd graph of one run of it.

A block may get objects that all blocks share, in which it leaves tensors for later ones:

    a mapping         its entries are inputs of a block, and what the block writes into it are outputs (tape.py). A
                      block gets a copy, in every run: with the class and attributes, and the entries of its inputs
    another object    tensors in its attributes would pass the cut between two blocks unseen, and lose their gradients;
                      a block that leaves some there is refused
"""

import copy
from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from keyhole.errors import UserError

Values = list[Any]
Result = tuple[Any, list[dict[Any, Any]]]  # What a block returns, and what it writes into each of its mappings.
WHOLE = "use zo, or a baseline (adamw, sgd), which differentiates the model as a whole"


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
        self.mappings: Values = [x for x in (*args, *kwargs.values()) if isinstance(x, MutableMapping)]
        self.empty = [_emptied(mapping) for mapping in self.mappings]
        place = {id(mapping): _Place(i) for i, mapping in enumerate(self.mappings)}
        args = tuple(place.get(id(x), x) for x in args)
        kwargs = {name: place.get(id(x), x) for name, x in kwargs.items()}
        self.values, self.spec = tree_flatten((args, kwargs, [dict(mapping) for mapping in self.mappings]))

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
            kinds = ", ".join(sorted({type(value).__name__ for value in objects}))
            raise UserError(
                f"model: its blocks hand tensors to each other in an object ({kinds}) that keyhole cannot "
                f"differentiate through, block by block; {WHOLE}"
            )
        return output


def _emptied(mapping: MutableMapping[Hashable, object]) -> MutableMapping[Hashable, object]:
    """A mapping of the same class and attributes, without entries."""
    found, entries = copy.copy(mapping), dict(mapping)
    found.clear()
    if len(mapping) != len(entries):
        mapping.update(entries)
        raise UserError(
            f"model: its blocks hand tensors to each other in a mapping ({type(mapping).__name__}) that shares its "
            f"entries with its copies; {WHOLE}"
        )
    return found


def held_tensors(objects: Values) -> set[int]:
    """Ids of tensors that may have gradients (not masks or positions) in the attributes of these objects, and in lists
    and dicts there."""
    leaves = [leaf for value in objects if hasattr(value, "__dict__") for leaf in tree_leaves(dict(vars(value)))]
    return {id(x) for x in leaves if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())}


@dataclass
class BlockGraph:
    """The autograd graph of one run of a block, cut off from the rest of the model. inputs: its leaves."""

    inputs: list[torch.Tensor]
    result: Result

    def gradients(self, grads: Values, parameters: list[nn.Parameter], keep: bool = False) -> tuple[Values, Values]:
        """Gradients of the inputs and of parameters (None: none), from those of the floating-point outputs. keep: the
        graph can be used again."""
        ends, of_ends = with_gradients(floats(self.result), grads)
        if not ends:
            return [None] * len(self.inputs), [None] * len(parameters)
        wanted = [*self.inputs, *parameters]
        found = torch.autograd.grad(ends, wanted, of_ends, allow_unused=True, retain_graph=keep)
        return list(found[: len(self.inputs)]), list(found[len(self.inputs) :])

    def reaches(self, tensors: set[int]) -> bool:
        """Whether any of these tensors (ids) would get a gradient."""
        seen: set[Any] = {None}
        left: Values = [y.grad_fn for y in floats(self.result)]
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                if node.name().endswith("AccumulateGrad") and id(node.variable) in tensors:
                    return True
                left += [before for before, _ in node.next_functions]
        return False


def floats(value: object) -> list[torch.Tensor]:
    """Its floating-point tensors, in order: those that may have gradients."""
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor) and v.is_floating_point()]


def with_gradients(outputs: Values, grads: Values) -> tuple[Values, Values]:
    """Those outputs, or edges of outputs, that have a graph and a gradient; and the gradients."""
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y is not None and g is not None]
    pairs = [(y, g) for y, g in pairs if not isinstance(y, torch.Tensor) or y.requires_grad]
    return [y for y, _ in pairs], [g for _, g in pairs]


def differentiate(ends: Values, grads: Values, keep: bool = False) -> None:
    """The backward pass from these ends. keep: it may be made again."""
    if ends:
        torch.autograd.backward(ends, grads, retain_graph=keep)
    ends.clear()
    grads.clear()
