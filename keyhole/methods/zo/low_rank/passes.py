"""The passes of a step with low-rank directions: one pass for all looks of a batch, if the model allows it.

A dense step has one pass per look and batch, each through its own copy of a unit. Here all looks share W, and differ
only by what is added to its product (model/forward/low_rank.py). So the rows of all looks go through a unit together,

    x = [rows of look 1; rows of look 2; ..]        x W^T is one product; W is read once, and never copied

and a streamed unit stays in its slot while all batches of the step pass it. What a unit lacks from the period before is
folded in when it arrives, and only then it is written back: within a period nothing is written.

Every look is a pass of its own through the same W in these cases: modules with parameters have submodules (so that they
cannot be called look by look), the model is a classifier, its head has layers, or a module turns out to see shapes
other than rows of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from keyhole import ops
from keyhole.methods.zo.looks import Looks
from keyhole.model.batch import DeviceBatch, repeated
from keyhole.model.forward.low_rank import NotByRows, Share
from keyhole.model.structure.layout import Unit

if TYPE_CHECKING:
    from keyhole.methods.zo.method import ZO


@dataclass(frozen=True)
class Carried:
    """A pass: its batch, the looks [first, first + count) that it carries, and the number that the pass of each look
    would have in a dense step (looks.py)."""

    batch: DeviceBatch
    first: int
    count: int
    numbers: list[int]

    def share(self) -> Share:
        rows, length = self.batch.inputs["input_ids"].shape
        return Share(self.first, self.count, rows * self.count, rows * length * self.count)


def carry(looks: Looks, together: bool) -> list[Carried]:
    """The passes of a step."""
    numbers, at = [], 0
    for batches in looks.batches:
        numbers.append(range(at, at + len(batches)))
        at += len(batches)
    alike = len({tuple(map(id, batches)) for batches in looks.batches}) == 1
    size = 1 if not together else len(numbers) if alike else 2
    found = []
    for first in range(0, len(numbers), size):
        group = numbers[first : first + size]
        for i, batch in enumerate(looks.batches[first]):
            found.append(Carried(batch, first, len(group), [look[i] for look in group]))
    return found


def run(zo: ZO, looks: Looks, steady: bool = True) -> list[torch.Tensor]:
    """The hidden states of all passes, numbered as those of a dense step."""
    if zo.factors.together:
        try:
            return _run(zo, looks, steady)
        except NotByRows:  # depends only on the model's code, so it is raised in the first step
            zo.factors.together = False
    return _run(zo, looks, steady)


def _run(zo: ZO, looks: Looks, steady: bool) -> list[torch.Tensor]:
    model, factors, engine = zo.model, zo.factors, zo.model.engine
    assert all(pair.looks == 2 for pair in looks.pairs[:-1]), "looks are numbered without gaps"
    factors.perturb([zo.perturbation(pair) for pair in looks.pairs])
    passes, spines = carry(looks, factors.together), zo.spines.flatten(0, 1)

    def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
        weights = None if unit is None else arrive(zo, unit)
        try:
            for index, one in enumerate(passes):
                model.binding.bind(unit, weights, spines[one.first])
                resume(index)
        finally:
            if unit is not None:
                engine.release(unit.index)

    found: list[torch.Tensor] = [torch.empty(0)] * len(looks.passes)
    with factors.carried({i: one.share() for i, one in enumerate(passes)}, zo.spines):
        batches = [repeated(one.batch, one.count) for one in passes]
        rows = _rows(zo, looks, passes)
        for one, hidden in zip(passes, model.lockstep(batches, serve, rows, steady=steady), strict=True):
            for number, part in zip(one.numbers, hidden.chunk(one.count), strict=True):
                found[number] = part
    return found


def arrive(zo: ZO, unit: Unit) -> torch.Tensor:
    """The unit's weights on the device, in the dtype of compute, with missing folds applied. Release it afterwards."""
    factors, engine = zo.factors, zo.model.engine
    awaited = zo.update.write_back.is_awaited(unit)
    w = engine.acquire(unit.index, changes=awaited or factors.owes(unit))
    if factors.arrive(unit, w, awaited) or awaited:
        engine.commit(unit.index)
    return zo.model.in_compute_dtype(unit, w)


def fold_rest(zo: ZO) -> None:
    """Folds units that no pass has visited, at the end of a sweep."""
    for unit in zo.model.layout.of_kind("block"):
        if zo.factors.owes(unit):
            arrive(zo, unit)
            zo.model.engine.release(unit.index)


def _rows(zo: ZO, looks: Looks, passes: list[Carried]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Rows of the table for a pass, concatenated over its looks."""
    table = zo.model.layout.table

    def rows(index: int, ids_M: torch.Tensor) -> torch.Tensor:
        one = passes[index]
        ids_M = ids_M.chunk(one.count)[0]
        stale_MH = zo.model.table_rows(ids_M)
        if not table.param.requires_grad:
            return stale_MH.to(zo.model.dtype).repeat(one.count, 1)
        zo.factors.part()
        decays = id(table.param) not in zo.update.spared
        update = zo.update.fused(zo.pending, decays) if zo.pending else {}
        made: dict[int, torch.Tensor] = {}
        for p in {look // 2 for look in range(one.first, one.first + one.count)}:
            step = ops.ZOStep(table.start, **zo.noise, **zo.perturbation(looks.pairs[p]), **update)
            made[2 * p], made[2 * p + 1] = ops.zo_rows(stale_MH, ids_M, step, zo.model.dtype)
        return torch.cat([made[look] for look in range(one.first, one.first + one.count)])

    return rows
