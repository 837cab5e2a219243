"""Gradients on several ranks, each of which keeps a shard of the weights: summed, and cut into the ranks' parts.

GradientParts stands between the reverse sweep and the sink of a method (model/backward/sink.py). It collects the
gradients of a block in a buffer with the layout of the block's units. When a unit is finished,

    g_r = sum over ranks of their gradient, this rank's part     pieces are exchanged and added in the order of ranks

and the method uses it (lomo/update.py, adam_offload/method.py). Table and common are replicated on every rank: their
gradients are summed, and every rank makes the same update. A tensor for which no rank has a gradient stays unchanged,
as in one process; ranks exchange which tensors these are only if that makes a difference.

Bytes: one block of gradients in the dtype of compute, and one unit more for the exchange. Over the network, per
backward pass: (N - 1) / N of the gradients of blocks and head, twice that of table and common, these in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.methods.settings import MethodSettings
from keyhole.model.backward.sink import Sink, tensors_of
from keyhole.model.batch import Batch, DeviceBatch
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.model.weights.homes import view
from keyhole.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """[begin, end) of a tensor, possibly empty. w: the whole tensor, on the device; grad: of these elements."""

    tensor: FlatTensor
    begin: int
    end: int
    w: torch.Tensor
    grad: torch.Tensor


class GradientParts(Sink):
    """A sink in front of a method's, for a model whose units are sharded."""

    def __init__(self, model: Model) -> None:
        self.model, self.ranks = model, model.ranks
        numel_of = {page: whole.numel() for page, whole in enumerate(model.engine.homes) if page in model.homes.parts}
        self.place: dict[int, tuple[int, int]] = {}  # unit -> begin and length of its gradients in the buffer
        ends: dict[int | None, int] = {}
        for unit in model.layout.units:
            if unit.index in numel_of:
                begin = ends.get(unit.block, 0) if unit.kind == "block" else 0
                self.place[unit.index] = begin, numel_of[unit.index]
                ends[unit.block if unit.kind == "block" else None] = begin + numel_of[unit.index]
        self.buffer = torch.zeros(max(ends.values()), dtype=model.dtype, device=model.device)
        self.unit_at = {t.start: u for u in model.layout.units if u.index in numel_of for t in tensors_of(u)}
        self.received: set[int] = set()  # tensors of the current block, by their start

    def begin(self) -> None:
        """Called before a backward pass."""
        self.received.clear()
        self.buffer.zero_()

    def _view(self, tensor: FlatTensor, unit: Unit) -> torch.Tensor:
        begin = self.place[unit.index][0] + tensor.start - unit.start
        return self.buffer[begin : begin + tensor.shape.numel()].view(tensor.shape)

    # -- Sink ------------------------------------------------------------------------------------------------------

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
            self.whole(tensor, w, self.ranks.sum(grad))
        else:
            self._view(tensor, unit).copy_(grad)
            self.received.add(tensor.start)

    # -- for the method --------------------------------------------------------------------------------------------

    def whole(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Takes the gradient of a tensor of table or common, summed over ranks in float32."""
        raise NotImplementedError  # abstract

    def whole_gradients(self, unit: Unit, tensors: list[FlatTensor]) -> list[tuple[FlatTensor, torch.Tensor]]:
        """These tensors of a unit with their gradients, summed over the ranks in float32; clears the unit."""
        begin, numel = self.place[unit.index]
        total = self.ranks.sum(self.buffer[begin : begin + numel])
        self.buffer[begin : begin + numel].zero_()
        return [(tensor, view(total, tensor, unit.start)) for tensor in tensors]

    def part_of(self, unit: Unit) -> torch.Tensor:
        """This rank's part of a unit's gradients, summed over the ranks in float32; clears the unit in the buffer."""
        begin, numel = self.place[unit.index]
        flat = self.buffer[begin : begin + numel]
        part = self.ranks.sum_of_parts(flat)
        flat.zero_()
        return part

    def pieces(self, unit: Unit, tensors: list[FlatTensor]) -> list[Piece]:
        """This rank's elements of these tensors of a unit, with their gradients."""
        w, part = self.on_device(unit), self.part_of(unit)
        first, found = unit.start + self.ranks.rank * part.numel(), []
        for tensor in tensors:
            lo = min(max(tensor.start, first), tensor.stop)
            hi = max(lo, min(tensor.stop, first + part.numel()))
            own = part[lo - first : hi - first] if lo < hi else part[:0]
            found.append(Piece(tensor, lo - tensor.start, hi - tensor.start, view(w, tensor, unit.start), own))
        return found

    def on_device(self, unit: Unit) -> torch.Tensor:
        """The unit's weights, whole, while it is visited."""
        engine: Any = self.model.engine  # of shards
        found: torch.Tensor = engine.on_device(unit.index)
        return found

    def with_gradient(self, unit: Unit, asks: bool = True) -> list[FlatTensor]:
        """The trained tensors of a unit; asks: only those for which some rank has a gradient."""
        trained = [tensor for tensor in tensors_of(unit) if tensor.param.requires_grad]
        got = [tensor.start in self.received for tensor in trained]
        self.received -= {tensor.start for tensor in trained}
        return of_any_rank(self.ranks, trained, got) if asks else trained


def of_any_rank(ranks: Ranks, items: list[T], got: list[bool]) -> list[T]:
    """The items that some rank has got; items: the same on all ranks."""
    if not items:
        return []
    found = ranks.gather(torch.tensor(got)).any(dim=0).tolist()
    return [item for item, one in zip(items, found, strict=True) if one]


@dataclass(frozen=True)
class Share:
    """A rank's part of a step. first: the index of its first pass; of_all: the number of passes of all ranks; count:
    the number that the loss is divided by; weight: of its passes, 0 if the rank has none of its own."""

    passes: list[DeviceBatch]
    first: int
    of_all: int
    count: int
    weight: float

    def first_rank(self, ranks: Ranks) -> int:
        """The rank that has the first pass: not the leader if there are fewer passes than ranks."""
        return -(-ranks.size // min(ranks.size, self.of_all)) - 1


def share(model: Model, batch: Batch | Sequence[Batch]) -> Share:
    """This rank's part. A rank without passes takes the first one with weight 0, because every rank must visit every
    unit."""
    batches, ranks = model.checked(batch), model.ranks
    own = ranks.share(batches)
    sent = model.send(own or batches[:1])
    count = ranks.total(sum(one.loss.count for one in sent) if own else 0)
    return Share(sent, ranks.rank * len(batches) // ranks.size, len(batches), max(1, count), float(bool(own)))


def total_loss(model: Model, loss: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' losses."""
    return model.ranks.in_order(loss[None], [model.ranks.size]).sum()


@torch.no_grad()
def sum_gradients(ranks: Ranks, params: list[nn.Parameter], at_once: bool = True) -> None:
    """Sums .grad over the ranks, of every parameter for which some rank has one. at_once: in one collective, which
    takes memory for all of them."""
    reached = of_any_rank(ranks, params, [param.grad is not None for param in params])
    for together in [reached] if at_once and reached else [[param] for param in reached]:
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in together]
        total = ranks.sum(torch.cat([grad.flatten() for grad in own]))
        for param, grad in zip(together, total.split([p.numel() for p in together]), strict=True):
            param.grad = grad.view(param.shape).to(param.dtype)


def check(own: MethodSettings) -> None:
    """Refuses settings that are not known to give the same result on several ranks."""
    for key, wrong in {"rounding": "kahan", "compile": True, "activations": "none"}.items():
        value = vars(own).get(key)
        if value == wrong or (key == "compile" and value):
            raise UserError(f"{key}={value}: not on several ranks; change it, or start without torchrun")
