"""LOMO on several ranks: every gradient is added up over the ranks, each updates the part of the weights that it keeps.

Stands between the reverse sweep and LOMO's sinks (sink.py). The gradients of a block are put side by side, laid out as
its units are; when a unit is finished,

    g_r = sum over ranks of their gradient, this rank's part     pieces are exchanged and added in the order of ranks
    w_r <- the rule of one process on these elements             by their indices, so rounding is the same

and the part goes home. A rule that looks at whole tensors (row and column sums, norms) gets the whole gradient of a
unit on every rank, and all of them make the same update of the whole unit in their slot; again only the part goes home.
The state of such a rule is the same on all ranks.

Spine and table are whole on every rank: their gradients are added up, and every rank makes the same update. Squares
(the norm), counts of changed weights and the mark of what is not finite are added up at the end of a reverse. A tensor
that no rank has a gradient of stays as it is, as in one process; ranks ask each other only where that makes a
difference, which is where weights decay, or a rule keeps state.

Bytes: one block of gradients in the dtype of compute, and one unit more for the exchange. Over the network, per
reverse: (N - 1) / N of the gradients of blocks and head, twice that of table and spine; for a rule of whole tensors the
same once more, in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.lomo.sink import NormSink, UpdateSink
from keyhole.model.backward.sink import chunk
from keyhole.model.batch import Batch, DeviceBatch, as_list
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit


class Shards:
    """A sink in front of another one, for a model whose units are sharded."""

    accumulates, by_factors, by_expert, update_key = False, False, False, None

    def __init__(self, model: Model, method: Any) -> None:
        self.model, self.method, self.ranks = model, method, model.ranks
        numel_of = {page: whole.numel() for page, whole in enumerate(model.engine.homes) if page in model.homes.parts}
        self.place: dict[int, tuple[int, int]] = {}  # unit -> where its gradients begin, and their length
        ends: dict[int | None, int] = {}
        for unit in model.layout.units:
            if unit.index in numel_of:
                begin = ends.get(unit.block, 0) if unit.kind == "block" else 0
                self.place[unit.index] = begin, numel_of[unit.index]
                ends[unit.block if unit.kind == "block" else None] = begin + numel_of[unit.index]
        self.buffer = torch.zeros(max(ends.values()), dtype=model.dtype, device=model.device)
        self.unit_at = {t.start: u for u in model.layout.units if u.index in numel_of for t in self._tensors(u)}
        self.received: set[int] = set()  # tensors of the block at work, by their start
        self.squares, self.changed = torch.zeros_like(method.sum_squares), torch.zeros_like(method.changed)
        self.sink: UpdateSink | NormSink

    @property
    def surveys(self) -> int:
        return self.sink.surveys

    @staticmethod
    def _tensors(unit: Unit) -> list[FlatTensor]:
        return [chunk(unit)] if unit.rows is not None else unit.tensors

    def share(self, batch: Batch | list[Batch]) -> tuple[list[DeviceBatch], int, int, float]:
        """(this rank's micro-batches, the number of the first of them, what the loss is a mean of, their weight). A
        rank without one takes the first of all, with weight 0: every rank visits every unit."""
        batches = as_list(batch)
        own, first = self.ranks.share(batches), self.ranks.rank * len(batches) // self.ranks.size
        sent = self.model.to_device(own or batches[:1])
        count = self.ranks.total(sum(one.loss_count for one in sent) if own else 0)
        return sent, first, max(1, count), float(bool(own))

    def in_front_of(self, sink: UpdateSink | NormSink) -> "Shards":
        """Hands over to this sink from now on."""
        self.sink = sink
        self.received.clear()
        self.buffer.zero_()
        return self

    def _view(self, tensor: FlatTensor, unit: Unit) -> torch.Tensor:
        begin = self.place[unit.index][0] + tensor.start - unit.start
        return self.buffer[begin : begin + tensor.shape.numel()].view(tensor.shape)

    # -- as a sink -------------------------------------------------------------------------------------------------

    def updated(self, tensors: list[FlatTensor]) -> None:
        raise AssertionError("nothing is recorded here")

    def survey(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor, turn: int) -> None:
        self.sink.survey(tensor, w, self.ranks.sum(grad), turn)

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        unit = self.unit_at.get(tensor.start)
        if unit is None:
            return False
        torch.mm(dy_MO.t(), x_MI, out=self._view(tensor, unit))
        self.received.add(tensor.start)
        return True

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        unit = self.unit_at.get(tensor.start)
        if unit is None:
            self.sink.gradient(tensor, w, self.ranks.sum(grad))
        else:
            self._view(tensor, unit).copy_(grad)
            self.received.add(tensor.start)

    def finished(self, unit: Unit) -> bool:
        if unit.index not in self.place:
            return self.sink.finished(unit)
        begin, numel = self.place[unit.index]
        flat = self.buffer[begin : begin + numel]
        if self.method.whole_tensors:
            grads = self.ranks.sum(flat)
            flat.zero_()
            w = self.model.engine.on_device(unit.index)
            for tensor in self._with_gradient(unit):
                place = slice(tensor.start - unit.start, tensor.stop - unit.start)
                self.sink.gradient(tensor, w[place].view(tensor.shape), grads[place].view(tensor.shape))
            return self.sink.finished(unit)
        part = self.ranks.sum_of_parts(flat)
        flat.zero_()
        first = unit.start + self.ranks.rank * part.numel()
        w = self.model.engine.on_device(unit.index)
        with self._own_sums():
            for tensor in self._with_gradient(unit):
                lo, hi = max(tensor.start, first), min(tensor.stop, first + part.numel())
                if lo < hi:
                    piece = replace(tensor, start=lo, shape=torch.Size((hi - lo,)))
                    self.sink.gradient(piece, w[lo - unit.start : hi - unit.start], part[lo - first : hi - first])
        return self.sink.finished(unit)

    def _with_gradient(self, unit: Unit) -> list[FlatTensor]:
        """The trained tensors of a unit; where weights decay, those of which some rank has a gradient."""
        trained = [tensor for tensor in self._tensors(unit) if tensor.param.requires_grad]
        got = [tensor.start in self.received for tensor in trained]
        self.received -= {tensor.start for tensor in trained}
        if trained and (self.method.weight_decay.rate or self.method.groups or self.method.whole_tensors):
            got = self.ranks.gather(torch.tensor(got)).any(dim=0).tolist()
            return [tensor for tensor, one in zip(trained, got, strict=True) if one]
        return trained

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


def check(name: str, rounding: str, compiled: bool | str, activations: str) -> None:
    """Refuses what is not known to be the same on several ranks."""
    for key, value, wrong in (
        ("rounding", rounding, rounding == "kahan"),
        ("compile", compiled, bool(compiled)),
        ("activations", activations, activations == "none"),
    ):
        if wrong:
            raise UserError(f"{name}.{key}={value}: not on several ranks; change it, or start without torchrun")
