"""Directions of low rank: one pass for all looks of a batch, if the model allows it.

A dense step has one pass per look and batch, each through its own copy of a unit. Here all looks share W, and differ
only by what is added to its product (model/forward/low_rank.py). So the rows of all looks go through a unit together,

    x = [rows of look 1; rows of look 2; ..]        x W^T is one product; W is read once, and never copied

and a streamed unit stays in its slot while all batches of the step pass it. What a period has learned is folded into
the weights when it ends; within a period nothing is written.

Every look is a pass of its own through the same W in these cases: modules with parameters have submodules (so that they
cannot be called look by look), the model is a classifier, its head has layers, or a module turns out to see shapes
other than rows of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from keyhole.methods.base import Saved, State
from keyhole.methods.zo.directions import AtLook, Dense
from keyhole.methods.zo.estimators import Looks, Pair
from keyhole.methods.zo.low_rank.factors import Factors, Fold
from keyhole.methods.zo.low_rank.guide import Guide
from keyhole.methods.zo.low_rank.layers import FactoredLayers
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.update import Pending, Update
from keyhole.model.batch import Batch, repeated
from keyhole.model.forward.low_rank import NotByRows, Share
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit

AT_ONCE = 2**30  # bytes of A of the periods that are folded in one visit of a unit, in a replay


class LowRank(Dense):
    """z = U V^T / sqrt(r) for the matrices of blocks, whose units are in update.elsewhere; dense for all other
    weights."""

    factors: Factors
    looks_at_once = True

    def __init__(self, model: Model, update: Update, own: ZOConfig, pairs: int) -> None:
        super().__init__(model, update, own, pairs)
        self.factors = Factors(model, own, pairs)
        self.guide = None if own.guide is None else Guide(self.factors, own.guide)
        self.layers = FactoredLayers(model, self.factors, self.guide)
        self.untouched = frozenset(self.factors.units)

    # -- a sweep ---------------------------------------------------------------------------------------------------

    def hidden(self, looks: Looks, steady: bool) -> list[torch.Tensor]:
        try:
            return self._hidden(looks, steady)
        except NotByRows:  # of looks in one pass; depends only on the model's code, so it is raised in the first step
            self.layers.together = False
            return self._hidden(looks, steady)

    def _hidden(self, looks: Looks, steady: bool) -> list[torch.Tensor]:
        self.layers.check()
        for p, pair in enumerate(looks.pairs):
            self.factors.perturb(p, self.perturbation(pair))
        commons, m, size = self.commons.flatten(0, 1), len(looks.batches), looks.looks if self.layers.together else 1
        shares, batches = [], []
        for first in range(0, looks.looks, size):
            for batch in looks.batches:
                rows, length = batch.inputs["input_ids"].shape
                shares.append(Share(first, size, rows * size, rows * length * size))
                batches.append(repeated(batch, size))

        def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
            weights = None if unit is None else self.model.device_weights.acquire(unit)
            try:
                for index, share in enumerate(shares):
                    self.model.binding.bind(unit, weights, commons[share.first])
                    resume(index)
            finally:
                if unit is not None:
                    self.model.engine.release(unit.index)

        def rows_of(index: int, ids_M: torch.Tensor) -> torch.Tensor:
            looked = range(shares[index].first, shares[index].first + size)
            ids_M = ids_M.chunk(size)[0]
            stale_MH = self.model.table_rows(ids_M)
            if not self.model.layout.table.param.requires_grad:
                return stale_MH.to(self.model.dtype).repeat(size, 1)
            self.layers.differ.add(index)
            made = {p: self.rows(stale_MH, ids_M, looks.pairs[p]) for p in {look // 2 for look in looked}}
            return torch.cat([made[look // 2][look % 2] for look in looked])

        with self.layers.carried(dict(enumerate(shares)), commons):
            hidden = [x.chunk(size) for x in self.model.lockstep(batches, serve, rows_of, steady=steady)]
        firsts = range(0, len(hidden), max(1, m))  # the passes of a dense step are numbered by look
        return [hidden[first + i][look] for first in firsts for look in range(size) for i in range(m)]

    # -- one look --------------------------------------------------------------------------------------------------

    @contextmanager
    def at_look(self, number: int, pair: Pair, side: int) -> Iterator[AtLook]:
        self.layers.check()
        if side == 0:
            self.factors.perturb(number, self.perturbation(pair))
        with super().at_look(number, pair, side) as replacement, self.layers.seen_at(2 * number + side):
            yield replacement

    def weights_at(self, unit: Unit, stored: torch.Tensor, number: int, pair: Pair) -> Sequence[torch.Tensor]:
        if unit.index not in self.factors.units:
            return super().weights_at(unit, stored, number, pair)
        weights = self.model.device_weights.in_compute_dtype(unit, stored)  # the layers add the perturbation
        return weights, weights

    # -- factors beside the weights --------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.factors.version

    def prepare(self, batches: list[Batch]) -> None:
        if self.guide is not None and self.guide.is_due:
            self.update.flush()
            self.guide.renew(batches)

    def updated(self, pending: Pending) -> None:
        if folds := self.factors.update(pending):
            self.layers.fold(folds)

    def owes(self, unit: Unit) -> bool:
        return unit.index not in self.factors.units and super().owes(unit)

    def replay(self, updates: list[Pending]) -> None:
        """The run without its passes: A is updated step by step, and what the periods have learned is folded into unit
        after unit, that of many periods in one visit. V of a guided run is read from its files."""
        folds: list[Fold] = []
        for pending in updates:
            if self.guide is not None and self.guide.is_due:
                self.guide.read()
            folds += self.factors.update(pending)
            if folds and (pending is updates[-1] or 4 * len(folds) * self.factors.parts.a_numel >= AT_ONCE):
                self.layers.fold(folds)
                folds = []
        self.update.replay(updates)

    def describe(self) -> list[str]:
        return self.layers.describe()

    @property
    def changed_share(self) -> torch.Tensor:
        update, factors = self.update, self.factors
        return (update.changed + factors.changed) / (update.trained_numel + factors.parts.numel)

    def state(self) -> State:
        return self.factors.state()

    def load(self, state: Saved, steps: int) -> None:
        self.factors.check_guide(state)
        self.factors.load(state, steps)
