"""Who takes gradients: the one thing that a method shows to the reverse sweep (reverse.py).

A tensor is named by its FlatTensor. A table that is visited in chunks of rows is given chunk by chunk, each as a tensor
of its own: `name[first:last]`, with the element index it starts at.
"""

from dataclasses import replace
from typing import Protocol

import torch

from keyhole.model.structure.layout import FlatTensor, Unit


class Sink(Protocol):
    """What becomes of gradients. w is the tensor as it is stored, on the device for the time of the call.

    A sink with an attribute `accumulates` that is true is offered every product dy^T x of a linear layer, one for each
    micro-batch and use of the weight, and adds them up itself; any other only those that are the whole gradient.
    """

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Offers a gradient dy^T x before it is made. True: taken. w may be changed, dx has been computed."""

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Gives a whole gradient. w may be changed."""

    def finished(self, unit: Unit) -> bool:
        """All gradients of the unit were given. True: its weights changed and must go home."""


def chunk(unit: Unit) -> FlatTensor:
    """The rows of a table that a unit holds, as a tensor of their own."""
    tensor = unit.tensors[0]
    first, last = unit.rows or (0, tensor.shape[0])
    if (first, last) == (0, tensor.shape[0]):
        return tensor
    shape = torch.Size((last - first, tensor.shape[1]))
    return replace(tensor, name=f"{tensor.name}[{first}:{last}]", start=unit.start, shape=shape)
