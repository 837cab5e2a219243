"""The autograd graph of one run of one block, cut off from the rest of the model: its inputs are leaves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

Values = list[Any]
Result = tuple[Any, list[dict[Any, Any]]]
"""What a block returns, and what it writes into each of its mappings."""


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


def floats(value: Any) -> list[torch.Tensor]:
    """Its floating-point tensors, in order: those that may have gradients."""
    return [v for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor) and v.is_floating_point()]


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
