"""LOMO on several ranks: each updates the part of the weights that it keeps, from the sum of all gradients
(methods/shards.py).

    w_r <- the rule of one process on this rank's elements of a unit       by their indices, so rounding is the same

and the part goes home. A rule that looks at whole tensors (row and column sums, norms) gets the whole gradient of a
unit on every rank, and all of them make the same update of the whole unit in their slot; again only the part goes home.
The state of such a rule is the same on all ranks.

Squares (the norm), counts of changed weights and the mark of what is not finite are added up at the end of a reverse.
Ranks ask each other which tensors have a gradient only where that makes a difference: where weights decay, or a rule
keeps state. For a rule of whole tensors gradients travel once more, in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from keyhole.methods.lomo.sink import NormSink, UpdateSink
from keyhole.methods.shards import GradientParts
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit


class Shards(GradientParts):
    """A sink in front of LOMO's."""

    def __init__(self, model: Model, method: Any) -> None:
        super().__init__(model)
        self.method = method
        self.squares, self.changed = torch.zeros_like(method.sum_squares), torch.zeros_like(method.changed)
        self.sink: UpdateSink | NormSink

    @property
    def surveys(self) -> int:  # type: ignore[override]
        return self.sink.surveys

    def in_front_of(self, sink: UpdateSink | NormSink) -> "Shards":
        """Hands over to this sink from now on."""
        self.sink = sink
        self.begin()
        return self

    def survey(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, turn: int) -> None:
        self.sink.survey(tensor, w, self.ranks.sum(grad), turn)

    def whole(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        self.sink.gradient(tensor, w, grad)

    def finished(self, unit: Unit) -> bool:
        if unit.index not in self.place:
            return self.sink.finished(unit)
        w, method = self.model.engine.on_device(unit.index), self.method
        asks = bool(method.weight_decay.rate or method.groups or method.whole_tensors)
        if method.whole_tensors:
            grads = self.all_of(unit)
            for tensor in self.with_gradient(unit, asks):
                place = slice(tensor.start - unit.start, tensor.stop - unit.start)
                self.sink.gradient(tensor, w[place].view(tensor.shape), grads[place].view(tensor.shape))
            return self.sink.finished(unit)
        part = self.part_of(unit)
        first = unit.start + self.ranks.rank * part.numel()
        with self._own_sums():
            for tensor in self.with_gradient(unit, asks):
                lo, hi = max(tensor.start, first), min(tensor.stop, first + part.numel())
                if lo < hi:
                    piece = replace(tensor, start=lo, shape=torch.Size((hi - lo,)))
                    self.sink.gradient(piece, w[lo - unit.start : hi - unit.start], part[lo - first : hi - first])
        return self.sink.finished(unit)

    @contextmanager
    def _own_sums(self) -> Iterator[None]:
        """A context in which the method counts what is this rank's part."""
        method = self.method
        whole = method.sum_squares, method.changed
        method.sum_squares, method.changed = self.squares, self.changed
        try:
            yield
        finally:
            method.sum_squares, method.changed = whole

    def add_up(self) -> None:
        """At the end of a reverse: sums over all ranks."""
        method = self.method
        if method.whole_tensors:  # every rank has seen all
            return
        found = torch.stack([self.squares.double(), self.changed.double(), method.bad.double()])
        squares, changed, bad = self.ranks.gather(found).sum(dim=0)
        method.sum_squares += squares.to(method.sum_squares.dtype)
        method.changed += changed.to(method.changed.dtype)
        method.bad.copy_(bad > 0)
        for own in (self.squares, self.changed):
            own.zero_()
