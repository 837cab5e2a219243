"""The autograd graph of one run of one block, cut off from the rest of the model: its inputs are leaves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten


@dataclass
class BlockGraph:
    """inputs: the leaves, in the order in which gradients of inputs are returned; output: what the block returned."""

    inputs: list[torch.Tensor]
    output: Any

    def gradients(
        self, grads: list[Any], parameters: list[nn.Parameter], keep: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the inputs and of parameters (None: none), from those of the floating-point outputs. keep: the
        graph can be used again."""
        outputs = [v for v in tree_flatten(self.output)[0] if isinstance(v, torch.Tensor) and v.is_floating_point()]
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad and g is not None]
        if not pairs:
            return [None] * len(self.inputs), [None] * len(parameters)
        ends, wanted = [y for y, _ in pairs], [*self.inputs, *parameters]
        found = torch.autograd.grad(ends, wanted, [g for _, g in pairs], allow_unused=True, retain_graph=keep)
        return list(found[: len(self.inputs)]), list(found[len(self.inputs) :])

    def reaches(self, tensors: set[int]) -> bool:
        """Whether any of these tensors (ids) would get a gradient."""
        outputs = [v for v in tree_flatten(self.output)[0] if isinstance(v, torch.Tensor)]
        seen: set[Any] = {None}
        left: list[Any] = [y.grad_fn for y in outputs]
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                if node.name().endswith("AccumulateGrad") and id(node.variable) in tensors:
                    return True
                left += [before for before, _ in node.next_functions]
        return False
