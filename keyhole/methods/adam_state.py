"""Master weights and Adam's moments of a whole model in host memory, updated unit by unit.

Three flat fp32 arrays, indexed like the model (model/layout.py): 12 bytes a parameter, whatever the cut into units and
wherever the weights live. A tensor's state is a view of them, so saving copies nothing, and what was saved from a
resident run goes on in a streamed one.

Like torch's, a tensor that got no gradient in a step is left alone: no update, no decay, and its own count of updates
(which bias correction needs) stays. Neighbours with equal counts are updated in one go, padding included.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.model.homes import view
from keyhole.model.layout import Layout, Unit
from keyhole.offload import arena
from keyhole.ops.host_adam import CHUNK_PER_THREAD, host_adamw_

NAMES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Trained:
    """A trained tensor, or a chunk of a table: where it begins, where the next begins, and in which unit."""

    unit: Unit
    start: int
    stop: int


def trained_in(unit: Unit) -> list[Trained]:
    """What a unit trains, in order."""
    if unit.rows is not None:
        return [Trained(unit, unit.start, unit.stop)] if unit.tensors[0].param.requires_grad else []
    stops = [t.start for t in unit.tensors[1:]] + [unit.stop]
    pairs = zip(unit.tensors, stops, strict=True)
    return [Trained(unit, t.start, stop) for t, stop in pairs if t.param.requires_grad]


@dataclass
class Step:
    """What the updates of one step share. `numbers` on the host: norms of all tensors, then clip factor and norm."""

    lr: float
    norms_K: torch.Tensor
    numbers: torch.Tensor
    given: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # unit -> starts of its gradients
    waiting: list[tuple[Unit, list[int]]] = field(default_factory=list)  # units whose update must wait for the end
    submitted: bool = False
    applied: bool = False
    bad: bool = False


class AdamState:
    """See the top of this file. `trained` by the index of the first element; threads: those of the caller's torch."""

    def __init__(self, layout: Layout, rule: dict[str, float], threads: int) -> None:
        self.layout, self.rule = layout, rule
        self.trained = {t.start: t for unit in layout.units for t in trained_in(unit)}
        self.units = list({t.unit.index: t.unit for t in self.trained.values()}.values())
        self.steps = dict.fromkeys(self.trained, 0)
        self.flats = [arena.host_memory(4 * layout.numel).view(torch.float32) for _ in NAMES]
        self.scratch = torch.empty(CHUNK_PER_THREAD * threads)

    def of(self, unit: Unit, begin: int = 0, end: int | None = None) -> list[torch.Tensor]:
        """[master, exp_avg, exp_avg_sq] of a range of a unit."""
        at = slice(unit.start + begin, unit.stop if end is None else unit.start + end)
        return [flat[at] for flat in self.flats]

    def start(self, unit: Unit, weights: torch.Tensor) -> None:
        """The master starts as these weights. Moments are touched: what does not fit should fail here."""
        master, *moments = self.of(unit)
        master.copy_(weights)
        for moment in moments:
            moment.zero_()

    def ranges(self, given: list[int]) -> list[tuple[int, int]]:
        """Places in their unit of what got a gradient: neighbours with equally many updates together."""
        ranges: list[list[int]] = []
        for at in given:
            one = self.trained[at]
            begin, end = one.start - one.unit.start, one.stop - one.unit.start
            if ranges and ranges[-1][1:] == [begin, self.steps[at]]:
                ranges[-1][1] = end
            else:
                ranges.append([begin, end, self.steps[at]])
        return [(begin, end) for begin, end, _ in ranges]

    def update(
        self, unit: Unit, given: list[int], page: torch.Tensor, lr: float, clip: float, in_place: bool = True
    ) -> None:
        """From the gradients in `page`, of the tensors that begin at `given`. in_place: they become new weights, in the
        same place; else the master alone is new."""
        for begin, end in self.ranges(given):
            part, step = page[begin:end], self.steps[unit.start + begin] + 1
            weight = part if in_place else None
            state = self.of(unit, begin, end)
            host_adamw_(*state, part, weight, step=step, lr=lr, clip=clip, scratch=self.scratch, **self.rule)
        for at in given:
            self.steps[at] += 1

    def write(self, unit: Unit, page: torch.Tensor) -> None:
        """The weights as they are, over whatever `page` holds."""
        page.copy_(self.of(unit)[0])

    def state_dict(self) -> dict[str, Any]:
        """By tensor, as views."""
        state: dict[str, Any] = {}
        for tensor in self.layout.tensors:
            if tensor.start in self.steps:
                for name, flat in zip(NAMES, self.flats, strict=True):
                    state[f"{tensor.name}/{name}"] = view(flat, tensor, 0)
                state[f"{tensor.name}/step"] = self.steps[tensor.start]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """One tensor at a time."""
        for tensor in self.layout.tensors:
            if tensor.start not in self.steps:
                continue
            if f"{tensor.name}/master" not in state:
                raise UserError(f"the optimizer state has no {tensor.name}, which this model trains")
            for name, flat in zip(NAMES, self.flats, strict=True):
                view(flat, tensor, 0).copy_(state[f"{tensor.name}/{name}"])
            for at in self.steps:
                if tensor.start <= at < tensor.stop:
                    self.steps[at] = int(state[f"{tensor.name}/step"])
