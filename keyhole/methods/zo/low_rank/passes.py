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

from collections.abc import Callable
from dataclasses import dataclass

import torch

from keyhole.methods.zo.looks import Looks
from keyhole.methods.zo.low_rank.factors import Factors
from keyhole.methods.zo.low_rank.layers import FactoredLayers
from keyhole.methods.zo.low_rank.merge import arrive
from keyhole.methods.zo.perturbed import PerturbedWeights
from keyhole.model.batch import DeviceBatch, repeated
from keyhole.model.forward.low_rank import NotByRows, Share
from keyhole.model.structure.layout import Unit


@dataclass(frozen=True)
class Carried:
    """A pass: its batch, the looks [first, first + count) that it carries, and the number that the pass of each look
    would have in a dense step (../looks.py)."""

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


def run(perturbed: PerturbedWeights, layers: FactoredLayers, looks: Looks, steady: bool = True) -> list[torch.Tensor]:
    """The hidden states of all passes, numbered as those of a dense step. steady: as in ../passes.py."""
    if layers.together:
        try:
            return _run(perturbed, layers, looks, steady)
        except NotByRows:  # depends only on the model's code, so it is raised in the first step
            layers.together = False
    return _run(perturbed, layers, looks, steady)


def _run(perturbed: PerturbedWeights, layers: FactoredLayers, looks: Looks, steady: bool) -> list[torch.Tensor]:
    model, engine = perturbed.model, perturbed.model.engine
    assert all(pair.looks == 2 for pair in looks.pairs[:-1]), "looks are numbered without gaps"
    layers.perturb([perturbed.perturbation(pair) for pair in looks.pairs])
    passes, spines = carry(looks, layers.together), perturbed.spines.flatten(0, 1)

    def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
        weights = None if unit is None else _acquire(perturbed, layers.factors, unit)
        try:
            for index, one in enumerate(passes):
                model.binding.bind(unit, weights, spines[one.first])
                resume(index)
        finally:
            if unit is not None:
                engine.release(unit.index)

    found: list[torch.Tensor] = [torch.empty(0)] * len(looks.passes)
    with layers.carried({i: one.share() for i, one in enumerate(passes)}, perturbed.spines):
        batches = [repeated(one.batch, one.count) for one in passes]
        rows = _rows(perturbed, layers, looks, passes)
        for one, hidden in zip(passes, model.lockstep(batches, serve, rows, steady=steady), strict=True):
            for number, part in zip(one.numbers, hidden.chunk(one.count), strict=True):
                found[number] = part
    return found


def _acquire(perturbed: PerturbedWeights, factors: Factors, unit: Unit) -> torch.Tensor:
    """The unit's weights on the device, in the dtype of compute, with missing folds applied. Release it afterwards."""
    engine, awaited = perturbed.model.engine, perturbed.update.write_back.is_awaited(unit)
    w = engine.acquire(unit.index, changes=awaited or factors.owes(unit))
    if arrive(factors, unit, w, awaited) or awaited:
        engine.commit(unit.index)
    return perturbed.model.in_compute_dtype(unit, w)


def fold_rest(perturbed: PerturbedWeights, factors: Factors) -> None:
    """Folds units that no pass has visited, at the end of a sweep."""
    for unit in perturbed.model.layout.of_kind("block"):
        if factors.owes(unit):
            _acquire(perturbed, factors, unit)
            perturbed.model.engine.release(unit.index)


def _rows(
    perturbed: PerturbedWeights, layers: FactoredLayers, looks: Looks, passes: list[Carried]
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Rows of the table for a pass, concatenated over its looks."""
    model = perturbed.model

    def rows(index: int, ids_M: torch.Tensor) -> torch.Tensor:
        one = passes[index]
        ids_M = ids_M.chunk(one.count)[0]
        stale_MH = model.table_rows(ids_M)
        if not model.layout.table.param.requires_grad:
            return stale_MH.to(model.dtype).repeat(one.count, 1)
        layers.part()
        made: dict[int, torch.Tensor] = {}
        for p in {look // 2 for look in range(one.first, one.first + one.count)}:
            made[2 * p], made[2 * p + 1] = perturbed.rows(stale_MH, ids_M, looks.pairs[p])
        return torch.cat([made[look] for look in range(one.first, one.first + one.count)])

    return rows
