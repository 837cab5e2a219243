"""LOMO on several ranks: each updates the part of the weights that it keeps, from the sum of all gradients
(methods/shards.py).

    w_r <- the rule of one process on this rank's elements of a unit       by their indices, so rounding is the same

and the part is written back. If a rule needs sums over whole tensors (row and column sums, norms), these are summed
over the ranks if possible (matrix_parts.py: AdaLOMO's matrices); else every rank gets the whole gradient of a tensor
and makes the same update in its slot, but writes back only its part. The state of such a rule is the same on all ranks.

Squares (for the norm), counts of changed weights and the flag for non-finite values are summed at the end of a backward
pass. Ranks exchange which tensors have a gradient only if that makes a difference: if weights decay, or a rule keeps
state. Whole gradients cross the network twice, the second time in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from keyhole.methods.lomo import matrix_parts
from keyhole.methods.lomo.matrix_parts import Piece
from keyhole.methods.lomo.sink import NormSink, UpdateSink
from keyhole.methods.lomo.squares import Squares
from keyhole.methods.shards import GradientParts
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.model.weights.homes import view


class Shards(GradientParts):
    """A sink in front of LOMO's sinks."""

    def __init__(self, model: Model, method: Any) -> None:
        super().__init__(model)
        self.method = method
        self.squares, self.changed = Squares(model.layout, model.device), torch.zeros_like(method.changed)
        self.sink: UpdateSink | NormSink

    @property
    def surveys(self) -> int:
        return self.sink.surveys

    def in_front_of(self, sink: Any) -> "Shards":
        """Sets the sink that receives the gradients from now on."""
        self.sink = sink
        self.begin()
        return self

    def survey(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, turn: int) -> None:
        sink: Any = self.sink  # an UpdateSink: the other asks for no surveys
        sink.survey(tensor, w, self.ranks.sum(grad), turn)

    def whole(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        self.sink.gradient(tensor, w, grad)

    def finished(self, unit: Unit) -> bool:
        if unit.index not in self.place:
            return self.sink.finished(unit)
        method = self.method
        asks = bool(method.settings.weight_decay or method.groups or method.whole_tensors)
        tensors, updates = self.with_gradient(unit, asks), self.sink is method
        if updates and method.whole_tensors:
            by_parts = [t for t in tensors if method.shares_matrices and len(t.shape) == 2 and not _is_chunk(t)]
            self._whole(unit, [t for t in tensors if t not in by_parts])
            if by_parts:
                matrix_parts.update(method, self._pieces(unit, by_parts), self.ranks, self.changed)
            else:
                self.forget(unit)
            return self.sink.finished(unit)
        with self._own_sums():
            for piece in self._pieces(unit, tensors):
                if piece.begin < piece.end:
                    tensor = piece.tensor
                    own = replace(
                        tensor, start=tensor.start + piece.begin, shape=torch.Size((piece.end - piece.begin,))
                    )
                    self.sink.gradient(own, piece.w.view(-1)[piece.begin : piece.end], piece.grad)
        return self.sink.finished(unit)

    def _whole(self, unit: Unit, tensors: list[FlatTensor]) -> None:
        """Gives every rank the whole gradients of these tensors; each updates them in its slot."""
        if not tensors:
            return
        engine: Any = self.model.engine  # of shards
        w = engine.on_device(unit.index)
        total = self.ranks.sum(torch.cat([self._view(tensor, unit).reshape(-1) for tensor in tensors]))
        for tensor, grad in zip(tensors, total.split([t.shape.numel() for t in tensors]), strict=True):
            self.sink.gradient(tensor, view(w, tensor, unit.start), grad.view(tensor.shape))

    def _pieces(self, unit: Unit, tensors: list[FlatTensor]) -> list[Piece]:
        """This rank's elements of these tensors, with their gradients summed over the ranks."""
        engine: Any = self.model.engine  # of shards
        w, part = engine.on_device(unit.index), self.part_of(unit)
        first, found = unit.start + self.ranks.rank * part.numel(), []
        for tensor in tensors:
            lo = min(max(tensor.start, first), tensor.stop)
            hi = max(lo, min(tensor.stop, first + part.numel()))
            own = part[lo - first : hi - first] if lo < hi else part[:0]
            found.append(Piece(tensor, lo - tensor.start, hi - tensor.start, view(w, tensor, unit.start), own))
        return found

    @contextmanager
    def _own_sums(self) -> Iterator[None]:
        """A context in which the method counts only this rank's part."""
        method = self.method
        whole = method.squares, method.changed
        method.squares, method.changed = self.squares, self.changed
        try:
            yield
        finally:
            method.squares, method.changed = whole

    def add_up(self) -> None:
        """Sums the counts over all ranks, at the end of a backward pass."""
        method = self.method
        found = torch.stack([self.squares.total().double(), self.changed.double(), method.bad.double()])
        squares, changed, bad = self.ranks.gather(found).sum(dim=0)
        method.squares.extra.add_(squares.float())
        method.changed += changed.to(method.changed.dtype)
        method.bad.copy_(bad > 0)
        for own in (self.squares, self.changed):
            own.zero_()


def _is_chunk(tensor: FlatTensor) -> bool:
    """Whether this is one of several chunks of a table, whose sums are over all chunks (table.py)."""
    return tensor.shape.numel() != tensor.param.shape.numel()
