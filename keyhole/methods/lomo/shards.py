"""LOMO on several ranks: each updates the part of the weights that it keeps, from the sum of all gradients
(methods/shards.py).

    w_r <- the rule of one process on this rank's elements of a unit       by their indices, so rounding is the same

and the part is written back. If a rule needs sums over whole tensors, ranks exchange these if possible (adalomo.py:
matrices); else every rank gets the whole gradient of a tensor and makes the same update in its slot, but writes back
only its part. The state of such a rule is the same on all ranks.

Squares (for the norm), counts of changed weights and the flag for non-finite values are summed at the end of a backward
pass. Ranks exchange which tensors have a gradient only if that makes a difference: if weights decay, or a rule keeps
state. Whole gradients cross the network twice, the second time in float32.
"""

from dataclasses import replace

import torch

from keyhole.methods.lomo.update import Norms, Tally, Update
from keyhole.methods.shards import GradientParts
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.model.weights.homes import view


class Shards(GradientParts):
    """A sink in front of LOMO's sinks."""

    def __init__(self, model: Model, update: Update) -> None:
        super().__init__(model)
        self.update = update
        self.own = Tally(model.layout, model.device)  # of this rank's part
        self.sink: Update | Norms = update

    def in_front_of(self, sink: Update | Norms) -> "Shards":
        """Sets the sink that receives the gradients from now on."""
        self.sink = sink
        self.begin()
        return self

    def whole(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        self.sink.gradient(tensor, w, grad)

    def finished(self, unit: Unit) -> bool:
        update = self.update
        if unit.index in self.place:
            asks = bool(update.own.weight_decay or update.groups or update.whole_tensors)
            tensors = self.with_gradient(unit, asks)
            if self.sink is update and update.whole_tensors:
                self._by_sums(unit, tensors)
            else:
                for piece in self.pieces(unit, tensors):
                    if piece.begin < piece.end:
                        shape = torch.Size((piece.end - piece.begin,))
                        own = replace(piece.tensor, start=piece.tensor.start + piece.begin, shape=shape)
                        self.sink.apply(own, piece.w.view(-1)[piece.begin : piece.end], piece.grad, self.own)
        return self.sink.finished(unit)

    def _by_sums(self, unit: Unit, tensors: list[FlatTensor]) -> None:
        """Matrices by their pieces, if the rule can; the others whole: each rank updates them in its slot."""
        parts = [t for t in tensors if len(t.shape) == 2 and self.update.shares_matrices]
        whole = [tensor for tensor in tensors if tensor not in parts]
        if whole:
            w = self.on_device(unit)
            total = self.ranks.sum(torch.cat([self._view(tensor, unit).reshape(-1) for tensor in whole]))
            for tensor, grad in zip(whole, total.split([t.shape.numel() for t in whole]), strict=True):
                self.sink.gradient(tensor, view(w, tensor, unit.start), grad.view(tensor.shape))
        if parts:
            self.update.apply_parts(self.pieces(unit, parts), self.ranks, self.own)
        else:
            self.forget(unit)

    def add_up(self) -> None:
        """Sums the counts over all ranks, at the end of a backward pass."""
        total, own = self.update.tally, self.own
        found = torch.stack([own.sums.sum().double(), own.changed.double(), (own.bad + total.bad).double()])
        squares, changed, bad = self.ranks.gather(found).sum(dim=0)
        total.extra.add_(squares.float())
        total.changed += changed.to(total.changed.dtype)
        total.bad.copy_(bad > 0)
        own.zero_()
        own.bad.zero_()
