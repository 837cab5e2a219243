"""Master weights and Adam's moments of the whole model in host memory, updated unit by unit.

Three flat fp32 arrays, in the order of the layout (model/structure/layout.py) without frozen units: 12 bytes per
parameter, however the model is cut into units and wherever the weights live. (An array is page-locked, and therefore
committed, as a whole.) A tensor's state is a view of the arrays, so saving copies nothing, and the state of a resident
run can be resumed in a streamed one.

As in torch, a tensor without a gradient in a step stays unchanged: no update, no decay, and its own count of updates
(for the bias correction) does not change. Adjacent tensors with equal counts and equal weight decay are updated
together, padding included.

On several ranks (methods/shards.py) the arrays hold this rank's part of each sharded unit, and ranges are relative to
the beginning of that part. Every rank has the update counts of all tensors.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from keyhole.disk.tensors import Ranges, range_of
from keyhole.errors import UserError
from keyhole.methods.weight_decay import WeightDecay
from keyhole.model.structure.layout import FlatTensor, Layout, Unit
from keyhole.model.weights.homes import view
from keyhole.offload import arena
from keyhole.ops.adam import CHUNK_PER_THREAD, host_adamw_

NAMES = ("master", "exp_avg", "exp_avg_sq")
PART = 32 * 2**20  # elements per update job: some 10 ms


@dataclass(frozen=True)
class Trained:
    """A trained tensor, or a chunk of a table: its unit, its start, and the start of the next one."""

    unit: Unit
    start: int
    stop: int
    param: nn.Parameter = field(repr=False, compare=False)


def trained_in(unit: Unit) -> list[Trained]:
    """The trained tensors of a unit, in order. (The spine of a model without a final norm of its own has none.)"""
    if not unit.tensors:
        return []
    if unit.rows is not None:
        param = unit.tensors[0].param
        return [Trained(unit, unit.start, unit.stop, param)] if param.requires_grad else []
    stops = [t.start for t in unit.tensors[1:]] + [unit.stop]
    pairs = zip(unit.tensors, stops, strict=True)
    return [Trained(unit, t.start, stop, t.param) for t, stop in pairs if t.param.requires_grad]


@dataclass(frozen=True)
class Part:
    """[begin, end) of this rank's part of a unit: adjacent tensors with equal update counts and weight decay. `step`:
    the number of the next update; `starts`: the trained tensors that begin here."""

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
    settled: bool = False  # all of its updates are done and counted

    def norms(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms of adjacent tensors: on the device, and their place on the host."""
        at = slice(self.slots[starts[0]], self.slots[starts[-1]] + 1)
        return self.norms_K[at], self.numbers[at]

    def is_bad(self, starts: list[int]) -> bool:
        """Whether these tensors must not be updated: a gradient is not finite."""
        if self.waits_for_norm:
            return not torch.isfinite(self.numbers[-1])
        return self.bad or not torch.isfinite(self.norms(starts)[1]).all()

    def clip(self) -> float:
        return float(self.numbers[-2]) if self.waits_for_norm else 1.0


class AdamState:
    """The three arrays, and the update of any part of them. trained: by the index of the first element; threads: number
    of torch threads of the caller; cut: by unit, the first element and the number of elements that this rank keeps, if
    it does not keep all."""

    def __init__(
        self,
        layout: Layout,
        rule: dict[str, float],
        decay: WeightDecay,
        threads: int,
        cut: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        self.layout, self.rule, self.decay, self.cut = layout, rule, decay, cut or {}
        self.trained = {t.start: t for unit in layout.units for t in trained_in(unit)}
        self.units = list({t.unit.index: t.unit for t in self.trained.values()}.values())
        self.steps = dict.fromkeys(self.trained, 0)
        self.kept = {unit.index: self.cut.get(unit.index, (0, unit.numel)) for unit in self.units}
        places = list(accumulate((self.kept[unit.index][1] for unit in self.units), initial=0))
        self.places = {unit.index: place for unit, place in zip(self.units, places, strict=False)}  # in the arrays
        self.flats = [arena.host_memory(4 * places[-1]).view(torch.float32) for _ in NAMES]
        self.scratch = torch.empty(CHUNK_PER_THREAD * threads)

    def of(self, unit: Unit, begin: int = 0, end: int | None = None) -> list[torch.Tensor]:
        """[master, exp_avg, exp_avg_sq] of a range of this rank's part of a unit."""
        place = self.places[unit.index]
        at = slice(place + begin, place + (self.kept[unit.index][1] if end is None else end))
        return [flat[at] for flat in self.flats]

    def _of(self, tensor: FlatTensor) -> list[torch.Tensor]:
        """[master, exp_avg, exp_avg_sq] of a trained tensor; the chunks of a table are adjacent."""
        unit = self.trained[tensor.start].unit
        return [view(flat, tensor, unit.start - self.places[unit.index]) for flat in self.flats]

    def _pieces(self, tensor: FlatTensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """For each unit that a sharded tensor spans (a table spans several): the index in the tensor at which this
        rank's part begins, and the part's [master, exp_avg, exp_avg_sq]."""
        for unit in (u for u in self.units if u.start < tensor.stop and tensor.start < u.stop):
            first, numel = self.kept[unit.index]
            begin, end = max(tensor.start, unit.start + first), min(tensor.stop, unit.start + first + numel)
            if begin < end:
                at = begin - unit.start - first
                yield begin - tensor.start, self.of(unit, at, at + end - begin)

    def ours(self, one: Trained) -> tuple[int, int]:
        """[begin, end) of a trained tensor in this rank's part of its unit; may be empty."""
        first, numel = self.kept[one.unit.index]
        begin, end = (min(max(at - one.unit.start - first, 0), numel) for at in (one.start, one.stop))
        return begin, end

    @property
    def trained_numel(self) -> int:
        """Elements that this rank updates."""
        return sum(end - begin for begin, end in map(self.ours, self.trained.values()))

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
        ranges: list[list[Any]] = []
        places: dict[int, int] = {}
        for at in starts:
            one = self.trained[at]
            (begin, end), how = self.ours(one), self._how(one)
            if begin == end:
                continue
            places[at] = begin
            if ranges and ranges[-1][1:] == [begin, how]:
                ranges[-1][1] = end
            else:
                ranges.append([begin, end, how])
        cuts: list[tuple[int, int, tuple[int, float]]]
        cuts = [(i, min(i + PART, end), how) for begin, end, how in ranges for i in range(begin, end, PART)]
        found = [Part(i, j, *how, tuple(at for at, place in places.items() if i <= place < j)) for i, j, how in cuts]
        elsewhere = tuple(at for at in starts if at not in places)  # on other ranks, but counted here too
        return [*found, Part(0, 0, 0, 0.0, elsewhere)] if elsewhere else found

    def _how(self, one: Trained) -> tuple[int, float]:
        """The number of a tensor's next update, and its weight decay."""
        return self.steps[one.start] + 1, self.decay.of(one.param)

    def update(self, unit: Unit, part: Part, page: torch.Tensor, lr: float, clip: float, in_place: bool = True) -> None:
        """Updates from the gradients in `page`. in_place: new weights overwrite the gradients; else only the master is
        updated."""
        grad, state = page[part.begin : part.end], self.of(unit, part.begin, part.end)
        weight = grad if in_place else None
        how: dict[str, Any]
        how = {"step": part.step, "weight_decay": part.weight_decay, **self.rule}
        update: Any = host_adamw_
        update(*state, grad, weight, lr=lr, clip=clip, scratch=self.scratch, **how)

    def count(self, part: Part) -> None:
        """Counts the part's update."""
        for at in part.starts:
            self.steps[at] += 1

    def write(self, unit: Unit, page: torch.Tensor, begin: int = 0, end: int | None = None) -> None:
        """Writes the current weights to this range of `page`."""
        page[begin:end].copy_(self.of(unit, begin, end)[0])

    def state_dict(self) -> dict[str, Any]:
        """State by tensor, as views; for sharded tensors, as ranges."""
        state: dict[str, Any] = {}
        for tensor in self.layout.tensors:
            if tensor.start not in self.steps:
                continue
            if self.trained[tensor.start].unit.index in self.cut:
                pieces = list(self._pieces(tensor))
                for k, name in enumerate(NAMES):
                    own = [(begin, flats[k]) for begin, flats in pieces]
                    state[f"{tensor.name}/{name}"] = Ranges(tuple(tensor.shape), torch.float32, own)
            else:
                state |= {f"{tensor.name}/{name}": own for name, own in zip(NAMES, self._of(tensor), strict=True)}
            state[f"{tensor.name}/step"] = self.steps[tensor.start]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads one tensor at a time."""
        for tensor in self.layout.tensors:
            if tensor.start not in self.steps:
                continue
            if f"{tensor.name}/master" not in state:
                raise UserError(f"the optimizer state has no {tensor.name}, which this model trains")
            if self.trained[tensor.start].unit.index in self.cut:
                for begin, flats in self._pieces(tensor):
                    for name, own in zip(NAMES, flats, strict=True):
                        own.copy_(range_of(state, f"{tensor.name}/{name}", begin, own.numel()))
            else:
                for name, own in zip(NAMES, self._of(tensor), strict=True):
                    own.copy_(state[f"{tensor.name}/{name}"])
            for at in self.steps:
                if tensor.start <= at < tensor.stop:
                    self.steps[at] = int(state[f"{tensor.name}/step"])
