"""Master weights and Adam's moments of the whole model in host memory, updated unit by unit.

Three flat fp32 arrays (methods/states.py), in the order of the layout without frozen units: 12 bytes per parameter,
however the model is cut into units and wherever the weights live. A tensor's state is a view of the arrays, so saving
copies nothing, and the state of a resident run can be resumed in a streamed one.

As in torch, a tensor without a gradient in a step stays unchanged: no update, no decay, and its own count of updates
(for the bias correction) does not change. Adjacent tensors with equal counts and equal weight decay are updated
together, padding included.

On several ranks (shards.py) the arrays hold this rank's part of each sharded unit, and ranges are relative to the
beginning of that part. Every rank has the update counts of all tensors.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.methods.base import Saved, State
from keyhole.methods.states import Piece, States
from keyhole.methods.weight_decay import WeightDecay
from keyhole.model.backward.sink import chunk
from keyhole.model.structure.layout import FlatTensor, Layout, Unit
from keyhole.ops.adam import host_adamw_

NAMES = ("master", "exp_avg", "exp_avg_sq")
PART = 32 * 2**20  # elements per update job: some 10 ms
WIDTH = 256  # 64-bit integers of a row of a fingerprint


@torch.no_grad()
def fingerprint(flat: torch.Tensor) -> torch.Tensor:
    """Equal for equal weights, without a copy of them: their bits as 64-bit integers in rows of WIDTH, each row summed
    (modulo 2^64). Another value changes its sum, and so does an exchange of two weights, unless both are in one row and
    in the same place of their integers."""
    flat, row = flat.detach(), WIDTH * 8 // flat.element_size()
    if flat.storage_offset() * flat.element_size() % 8:  # not where an integer may begin
        flat = flat.clone()
    whole = flat.numel() // row * row
    rest = flat[whole:].contiguous().view(torch.uint8).long()
    return torch.cat([flat[:whole].view(torch.int64).view(-1, WIDTH).sum(dim=1), rest])


@dataclass(frozen=True)
class Trained:
    """A trained tensor, or a chunk of a table: its unit, its start, and the start of the next one."""

    unit: Unit
    start: int
    stop: int
    param: nn.Parameter = field(repr=False, compare=False)


def trained_in(unit: Unit) -> list[Trained]:
    """The trained tensors of a unit, in order. (The spine of a model without a final norm of its own has none.)"""
    tensors = [chunk(unit)] if unit.rows is not None else unit.tensors
    stops = [*(t.start for t in tensors[1:]), unit.stop]
    pairs = zip(tensors, stops, strict=False)
    return [Trained(unit, t.start, stop, t.param) for t, stop in pairs if t.param.requires_grad]


@dataclass(frozen=True)
class Part:
    """[begin, end) of this rank's part of a unit: adjacent tensors with equal update counts and weight decay. `step`:
    the number of the next update; `starts`: the trained tensors that are counted with it."""

    begin: int
    end: int
    step: int
    weight_decay: float
    starts: tuple[int, ...]


@dataclass
class AdamStep:
    """Data shared by the updates of one step. `numbers` on the host: norms of all tensors (`slots`: the index of each),
    then clip factor and norm of the whole gradient. waits_for_norm: these two are known before the first update."""

    lr: float
    norms_K: torch.Tensor
    numbers: torch.Tensor
    slots: dict[int, int]
    waits_for_norm: bool
    starts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # unit -> tensors with a gradient
    waiting: list[tuple[Unit, list[int]]] = field(default_factory=list)  # units whose update must wait for the end
    submitted: bool = False
    applied: bool = False
    bad: bool = False

    def norms(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms of adjacent tensors: on the device, and their place on the host."""
        at = slice(self.slots[starts[0]], self.slots[starts[-1]] + 1)
        return self.norms_K[at], self.numbers[at]

    def is_bad(self, starts: list[int]) -> bool:
        """Whether these tensors must not be updated: a gradient is not finite."""
        if self.waits_for_norm:
            return not torch.isfinite(self.numbers[-1])
        return self.bad or not torch.isfinite(self.norms(starts)[1]).all()

    @property
    def clip(self) -> float:
        return float(self.numbers[-2]) if self.waits_for_norm else 1.0


class AdamState:
    """The three arrays, and the update of any part of them. trained: by the index of the first element; cut: by unit,
    the first element and the number of elements that this rank keeps, if it does not keep all."""

    def __init__(
        self,
        layout: Layout,
        rule: dict[str, float],
        decay: WeightDecay,
        cut: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        self.layout, self.rule, self.decay, self.cut = layout, rule, decay, cut or {}
        self.trained = {t.start: t for unit in layout.units for t in trained_in(unit)}
        self.units = list({t.unit.index: t.unit for t in self.trained.values()}.values())
        self.steps = dict.fromkeys(self.trained, 0)
        self.kept = {unit.index: self.cut.get(unit.index, (0, unit.numel)) for unit in self.units}
        self.states = States({unit: numel for unit, (_, numel) in self.kept.items()}, NAMES)

    def of(self, unit: Unit, begin: int = 0, end: int | None = None) -> list[torch.Tensor]:
        """[master, exp_avg, exp_avg_sq] of a range of this rank's part of a unit."""
        return self.states.of(unit.index, begin, end)

    def ours(self, unit: Unit, start: int, stop: int) -> tuple[int, int]:
        """[begin, end) of the elements from start to stop in this rank's part of a unit; may be empty."""
        first, numel = self.kept[unit.index]
        begin, end = (min(max(at - unit.start - first, 0), numel) for at in (start, stop))
        return begin, end

    @property
    def trained_numel(self) -> int:
        """Elements that this rank updates."""
        ranges = [self.ours(one.unit, one.start, one.stop) for one in self.trained.values()]
        return sum(end - begin for begin, end in ranges)

    def start(self, unit: Unit, weights: torch.Tensor) -> None:
        """Sets the master to these weights. Also writes the moments, so that a lack of memory fails here."""
        master, *moments = self.of(unit)
        master.copy_(weights)
        for moment in moments:
            moment.zero_()

    def follow(self, unit: Unit, weights: torch.Tensor) -> None:
        """Sets the master to these weights where it does not round to them, because another method has changed them.
        Elsewhere it keeps its precision."""
        master = self.of(unit)[0]
        master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights.float()))

    def parts(self, starts: list[int]) -> list[Part]:
        """The parts to update, for tensors with a gradient (by their first elements): adjacent tensors with equal
        update counts and weight decay together, in pieces of at most PART."""
        found: list[Part] = []
        elsewhere: tuple[int, ...] = ()  # on other ranks, but counted here too
        for at in starts:
            one = self.trained[at]
            begin, end = self.ours(one.unit, one.start, one.stop)
            how = self.steps[at] + 1, self.decay.of(one.param)
            last = found[-1] if found else Part(0, 0, 0, 0.0, ())
            if begin == end:
                elsewhere = (*elsewhere, at)
            elif (last.end, last.step, last.weight_decay) == (begin, *how):
                found[-1] = replace(last, end=end, starts=(*last.starts, at))
            else:
                found.append(Part(begin, end, *how, (at,)))
        pieces = [
            replace(part, begin=i, end=min(i + PART, part.end), starts=part.starts if i == part.begin else ())
            for part in found
            for i in range(part.begin, part.end, PART)
        ]
        return [*pieces, Part(0, 0, 0, 0.0, elsewhere)] if elsewhere else pieces

    def update(
        self,
        unit: Unit,
        part: Part,
        page: torch.Tensor,
        lr: float,
        clip: float,
        in_place: bool = True,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """Updates from the gradients in `page`. in_place: new weights overwrite the gradients; else only the master is
        updated. scratch: see host_adamw_."""
        grad, (master, exp_avg, exp_avg_sq) = page[part.begin : part.end], self.of(unit, part.begin, part.end)
        host_adamw_(
            master, exp_avg, exp_avg_sq, grad, grad if in_place else None,
            step=part.step, weight_decay=part.weight_decay, lr=lr, clip=clip, scratch=scratch,
            beta1=self.rule["beta1"], beta2=self.rule["beta2"], eps=self.rule["eps"],
        )  # fmt: skip

    def count(self, part: Part) -> None:
        """Counts the part's update."""
        for at in part.starts:
            self.steps[at] += 1

    def write(self, unit: Unit, page: torch.Tensor, begin: int = 0, end: int | None = None) -> None:
        """Writes the current weights to this range of `page`."""
        page[begin:end].copy_(self.of(unit, begin, end)[0])

    def pieces(self, tensor: FlatTensor) -> list[Piece]:
        """Where this rank's part of a tensor is; a table may span several units."""
        units = [u for u in self.units if u.start < tensor.stop and tensor.start < u.stop]
        found = [(u, *self.ours(u, tensor.start, tensor.stop)) for u in units]
        return [
            Piece(u.index, begin, end, u.start + self.kept[u.index][0] + begin - tensor.start)
            for u, begin, end in found
            if begin < end
        ]

    def state_dict(self) -> State:
        """State by tensor, as views; for sharded tensors, as ranges."""
        state: State = {}
        for tensor in (tensor for tensor in self.layout.tensors if tensor.start in self.steps):
            whole = self.trained[tensor.start].unit.index not in self.cut
            state |= self.states.saved(tensor.name, tensor.shape, self.pieces(tensor), whole)
            state[f"{tensor.name}/step"] = self.steps[tensor.start]
        return state

    def load_state_dict(self, state: Saved) -> None:
        """Loads one tensor at a time."""
        for tensor in (tensor for tensor in self.layout.tensors if tensor.start in self.steps):
            if f"{tensor.name}/master" not in state:
                raise UserError(f"the optimizer state has no {tensor.name}, which this model trains")
            self.states.load(tensor.name, self.pieces(tensor), state)
            count = int(state[f"{tensor.name}/step"])
            self.steps |= {at: count for at in self.steps if tensor.start <= at < tensor.stop}
