"""The interface through which a method receives gradients from the reverse sweep (reverse.py).

A FlatTensor identifies a tensor. A table that is visited in chunks of rows is handed over chunk by chunk, each as a
tensor of its own: `name[first:last]`, with the element index at which it starts. A sink that needs sums over a whole
table before it can use the first chunk sets `surveys`: the gradients of all chunks are computed and shown to it that
many times before.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from keyhole.model.structure.layout import FlatTensor, Unit

Found = tuple[FlatTensor, torch.Tensor, torch.Tensor]
"""(tensor, its weights, its gradient)"""


@dataclass(frozen=True)
class SinkPolicy:
    """How a sink takes gradients."""

    accumulates: bool = False
    """It is offered every product dy^T x of a linear layer, one per micro-batch and use of the weight, and sums them
    itself; else only products that are the complete gradient."""
    by_factors: bool = False
    """It takes products of linear layers as (dy, x), never as a tensor."""
    by_expert: bool = False
    """Each matrix of a large stack of experts is handed over as a tensor of its own (experts.py); else a stack is one
    tensor."""


class Sink:
    """Receives every gradient once. w is the tensor as it is stored at home; it is on the device during the call. This
    one is for a model whose own weights are all frozen: it receives nothing and changes nothing."""

    policy = SinkPolicy()

    @property
    def surveys(self) -> int:
        """How many times the chunks of a table are shown (`survey`) before they are handed over (`gradient`)."""
        return 0

    @property
    def update_key(self) -> Hashable | None:
        """What the launches of `gradient` depend on besides addresses, if they are our own kernels at fixed addresses
        and all values that change from step to step are on the device; they may then be captured as a CUDA graph
        (unit_gradients.py). None: they may not."""
        return None

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        """Offers a gradient dy^T x as its factors. True: accepted. w may be changed, since dx has been computed."""
        return False

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Hands over a complete gradient. w may be changed."""
        raise AssertionError(f"{tensor.name} is frozen and has a gradient")

    def gradients_together(self, found: list[Found]) -> None:
        """Hands over several complete gradients of one unit."""
        for one in found:
            self.gradient(*one)

    def finished(self, unit: Unit) -> bool:
        """All gradients of the unit were handed over. True: its weights have changed, and must be written back."""
        return False

    def unmet(self, tensor: FlatTensor) -> bool:
        """No token was routed to this expert: its gradient is zero. True: the sink needs nothing more; False: it needs
        `gradient` all the same."""
        return True

    def survey(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, turn: int) -> None:
        """Shows the gradient of a chunk. turn: how often it was shown before. w must not be changed."""

    def updated(self, tensors: list[FlatTensor]) -> None:
        """A graph replay has done on the device what `gradient` does with these tensors."""


class RecordableSink(Sink):
    """A sink whose `linear` only writes to memory of its own, at fixed addresses: it may be captured together with the
    backward pass of a block (recorded.py). units: those of the block."""

    def state(self, units: list[Unit]) -> Hashable | None:
        """A key on which the launches of the next offers depend. None: they must not be captured now."""
        raise NotImplementedError

    def memory(self, units: list[Unit]) -> list[torch.Tensor]:
        """The tensors that offers write to."""
        raise NotImplementedError

    def mark(self) -> object:
        """The host-side state of the offers so far."""
        raise NotImplementedError

    def rewind(self, mark: object) -> None:
        """Restores that state: the offers since then will be made again."""
        raise NotImplementedError

    def replayed(self, offers: list[tuple[FlatTensor, torch.Tensor]]) -> None:
        """A graph replay has done on the device what `linear` does with these tensors and their weights."""
        raise NotImplementedError


def chunk(unit: Unit) -> FlatTensor:
    """The rows of a table that a unit holds, as a FlatTensor of their own."""
    tensor = unit.tensors[0]
    first, last = unit.rows or (0, tensor.shape[0])
    if (first, last) == (0, tensor.shape[0]):
        return tensor
    shape = torch.Size((last - first, tensor.shape[1]))
    return replace(tensor, name=f"{tensor.name}[{first}:{last}]", start=unit.start, shape=shape)


def runs_of(tensors: list[FlatTensor]) -> list[list[FlatTensor]]:
    """The tensors in order, those that are adjacent together."""
    runs: list[list[FlatTensor]] = []
    for tensor in sorted(tensors, key=lambda one: one.start):
        if runs and runs[-1][-1].stop == tensor.start:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs
