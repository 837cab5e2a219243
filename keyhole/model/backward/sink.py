"""What a method does with gradients: the one interface between a method and the reverse sweep (reverse.py).

A tensor is named by its FlatTensor. A table that is visited in chunks of rows is handed over chunk by chunk, each as a
tensor of its own: `name[first:last]`, with the element index at which it starts. A sink that needs sums over all of a
table before it can use the first chunk has its gradients shown before, `surveys` times: they are made anew each time.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from keyhole.model.structure.layout import FlatTensor, Unit


class Sink(Protocol):
    """Receives every gradient once. w is the tensor as it is stored at home, on the device for the time of the call."""

    accumulates: bool
    """True: the sink is offered every product dy^T x of a linear layer, one per micro-batch and use of the weight, and
    adds them up itself. False: it is offered only products that are the complete gradient."""

    surveys: int
    """How many times the chunks of a table are shown (`survey`) before they are handed over (`gradient`)."""

    by_factors: bool
    """True: products of linear layers are wanted as (dy, x), never as a tensor."""

    update_key: Hashable | None
    """What the launches of `gradient` depend on beside addresses, if they are our own kernels at fixed addresses with
    all that changes from step to step on the device; then they may be recorded (unit_gradients.py). None: they may
    not."""

    by_expert: bool
    """True: each matrix of a large stack of experts is handed over as a tensor of its own (experts.py); the sink is an
    ExpertSink. False: a stack is one tensor."""

    def updated(self, tensors: list[FlatTensor]) -> None:
        """A recording has done what `gradient` does with these tensors on the device."""

    def survey(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, turn: int) -> None:
        """Shows the gradient of a chunk, for the turn-th time, counted from 0. w must not be changed."""

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Offers a gradient dy^T x by its factors. True: accepted. w may be changed; dx has been computed."""

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Hands over a complete gradient. w may be changed."""

    def finished(self, unit: Unit) -> bool:
        """All gradients of the unit were handed over. True: its weights have changed, and must go home."""


class ExpertSink(Sink, Protocol):
    """A sink that takes experts one by one."""

    def unmet(self, tensor: FlatTensor) -> bool:
        """No token met this expert: its gradient is zero. True: then nothing is to be done; False: `gradient` is wanted
        all the same."""


class Nothing:
    """The sink of a model none of whose own weights is trained: there is nothing to receive, and nothing changes."""

    accumulates, by_factors, by_expert, surveys = False, False, False, 0
    update_key: Hashable | None = None

    def updated(self, tensors: list[FlatTensor]) -> None:
        """Never called."""

    def survey(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, turn: int) -> None:
        """Never called."""

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        return False

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        raise AssertionError(f"{tensor.name} is frozen and has a gradient")

    def finished(self, unit: Unit) -> bool:
        return False


@runtime_checkable
class Recordable(Protocol):
    """A sink whose `linear` does no more than write to memory of its own, at fixed addresses: it may be recorded with
    the reverse of a block (recorded.py). units: those of the block."""

    def state(self, units: list[Unit]) -> Hashable | None:
        """What the next offers will launch depends on it. None: they must not be recorded now."""

    def memory(self, units: list[Unit]) -> list[torch.Tensor]:
        """What offers write to."""

    def mark(self) -> object:
        """What the host knows of the offers so far."""

    def rewind(self, mark: object) -> None:
        """Forgets what the host knows of offers since then: they will be made again."""

    def replayed(self, offers: list[tuple[FlatTensor, torch.Tensor]]) -> None:
        """A recording has done on the device what `linear` does with these tensors and their weights."""


def chunk(unit: Unit) -> FlatTensor:
    """The rows of a table that a unit holds, as a tensor of their own."""
    tensor = unit.tensors[0]
    first, last = unit.rows or (0, tensor.shape[0])
    if (first, last) == (0, tensor.shape[0]):
        return tensor
    shape = torch.Size((last - first, tensor.shape[1]))
    return replace(tensor, name=f"{tensor.name}[{first}:{last}]", start=unit.start, shape=shape)
