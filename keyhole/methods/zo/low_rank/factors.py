"""The factors of low-rank directions: perturbed for a step, updated after it, set aside at the end of a period.

For every linear layer W [O, I] of the blocks, step t in period k = t // refresh, direction i:

    z_i = U_{t,i} V_k^T / sqrt(r)        U [O, r], V [I, r] from Philox: (seed, t, i, element), (seed, k, element)
    W_t = W + A V_k^T / sqrt(r)          A [O, r] float32: what this period has learned
    look:    A +- eps U_{t,i}            the weights w +- eps z_i, without a copy of them
    update:  A <- A - lr sum_i c_i U_{t,i}

An element of z_i has variance 1, as in a dense direction, so eps and rates mean the same. (LOZO has U V^T, and lr / r
in the update: the same step, with an eps larger by sqrt(r).) So a low-rank step is a dense step on the array of all A,
which is thousands of times smaller than the model: both use the same kernel (ops/zo/flat.py), in float32. v holds
V / sqrt(r), rounded to the dtype of compute; every use has these rounded numbers.

When a period ends, A is reset to 0, and what the period has learned is

    folded    W <- round(W + A V_k^T / sqrt(r)) at the unit's next visit (merge.py): W is read and written once per
              period, and not written within it; until then A and V are a `Fold`
    kept      as r more terms beside W, which never changes and so may be frozen in any format; from time to time the
              terms are compressed to fewer terms (kept.py)

A fold rounds once per period, where dense steps round after every update: less often by a factor of `refresh`.

Bytes, for n numbers in all A and vectors, m in all V, L looks, b bytes per number in compute:
4 n + 4 L n + b m; until a fold is done 4 n + b m more; for each kept period b (n + m) (kept.py).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.zo.low_rank.kept import Kept
from keyhole.methods.zo.low_rank.parts import Parts, find_parts, vector_at
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.update import Pending
from keyhole.model.model import Model
from keyhole.model.structure.layout import ALIGN, FlatTensor, Unit
from keyhole.model.weights.format import PACKED


@dataclass
class Fold:
    """What a period has learned and some homes still lack; left: the units that lack it."""

    a: torch.Tensor
    v: torch.Tensor
    step: int  # for its rounding bits
    left: set[int] = field(default_factory=set)


class Factors:
    """The factors of one model, as numbers."""

    def __init__(self, model: Model, own: ZOConfig, pairs: int) -> None:
        """own: filled, with a rank. pairs: the most pairs of looks of a step."""
        assert own.rank is not None and own.distribution is not None
        self.model: Model = weakref.proxy(model)  # which holds this object, by its layers
        self.noise: dict[str, Any] = {"seed": own.seed, "distribution": own.distribution}
        self.rank, self.refresh, self.folds, self.merges = own.rank, own.refresh, own.fold, own.merge
        self.rounding = own.rounding
        self.parts: Parts = find_parts(model, own.rank)
        self.units = {unit.index for unit in model.layout.of_kind("block")}
        self.restored: set[int] = set()  # which of the other units came from a light checkpoint (state.py)
        if own.fold and any(model.engine.homes[i].dtype == PACKED for i in self.units):
            raise UserError("wire: weights that are packed are not rounded anew by zo.rank; set zo.fold=false")
        device = model.device
        self.now = torch.zeros(self.parts.numel, device=device)
        wide = -(-self.parts.numel // ALIGN) * ALIGN  # aligns every look for wide memory accesses
        self.looks = torch.empty(2 * pairs, wide, device=device)[:, : self.parts.numel]
        periods = None if own.fold else own.fold_periods
        self.kept = Kept(self.parts, model.dtype, periods, own.fold_error, own.guide is not None, model.ranks)
        self.fold: Fold | None = None
        self.steps, self.v = 0, self.draw_v(0)  # number of steps done; v of the period that they lead to
        self.changed = torch.zeros((), dtype=torch.int64, device=device)
        self.found_for: int | None = None  # the period that V was found for (guide.py)
        for vector in self.parts.vectors:
            vector_at(self.now, vector).copy_(model.home(vector.tensor))

    # -- noise and updates -----------------------------------------------------------------------------------------

    def draw_v(self, period: int) -> torch.Tensor:
        """V / sqrt(r) of all layers, in the dtype of compute."""
        parts, device = self.parts, self.model.device
        v = ops.draw_noise(parts.v_numel, offset=parts.v_start, step=period, device=device, **self.noise)
        return v.mul_(self.rank**-0.5).to(self.model.dtype)

    @property
    def period(self) -> int:
        """The number of the period that the next step belongs to."""
        return self.steps // self.refresh

    def take_v(self, v: torch.Tensor, period: int) -> None:
        """Sets the V of the present period, in place: CUDA graphs use its address."""
        self.v.copy_(v)
        self.found_for = period

    @contextmanager
    def another_v(self, period: int) -> Iterator[None]:
        """A context in which passes use the V of another period, for a search that changes nothing."""
        self.v.copy_(self.draw_v(period))
        try:
            yield
        finally:
            self.v.copy_(self.draw_v(self.period))

    def perturb(self, perturbations: list[ops.ZOStep]) -> None:
        """Computes the looks of a step: for each pair its step, eps, direction, and what is beside it."""
        for p, how in enumerate(perturbations):
            ops.zo_flat_(self.now, self.looks[2 * p], self.looks[2 * p + 1], replace(how, offset=self.parts.start))

    def update(self, pending: Pending) -> None:
        """Applies the update of a finished step."""
        assert self.fold is None or not self.fold.left, "a fold of the period before is not done"
        how = pending.added_to(ops.ZOStep(self.parts.start, **self.noise), 0.0, self.changed.zero_())
        ops.zo_flat_(self.now, None, None, how)
        self.steps = cast(int, pending.step) + 1
        if self.steps % self.refresh == 0:
            self._end_period()

    def _end_period(self) -> None:
        a = self.now[: self.parts.a_numel]
        if self.folds:
            self.fold = Fold(a.clone(), self.v.clone(), self.steps, set(self.units))
        else:
            self.kept.add(a, self.v)
            self.kept.end_period(self.steps, self.refresh)
        a.zero_()
        self.v.copy_(self.draw_v(self.period))  # in place: CUDA graphs use its address

    # -- weights at home -------------------------------------------------------------------------------------------

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks a fold."""
        return self.fold is not None and unit.index in self.fold.left

    @property
    def is_steady(self) -> bool:
        """Whether a step changes no weight of blocks."""
        return self.fold is None or not self.fold.left

    def is_behind(self, unit: Unit) -> bool:
        """Whether the unit's home lacks a fold, or the current values of vectors."""
        return self.owes(unit) or (self.steps > 0 and next(self.parts.vectors_of(unit), None) is not None)

    def learned(self, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(a, v) of a matrix that its home lacks, oldest first, after all folds are done."""
        matrix, learned = self.parts.matrices[index], []
        if self.kept:
            learned.append(self.kept.learned(index))
        if self.steps % self.refresh:
            learned.append((self.rows(self.now, matrix.a), self.rows(self.v, matrix.v).float()))
        return learned

    def sample(self, tensor: FlatTensor) -> torch.Tensor | None:
        """What is currently learned of a tensor beside its home; None if it is trained at home."""
        places = {id(m.tensor): m.a for m in self.parts.matrices} | {id(v.tensor): v.at for v in self.parts.vectors}
        at = places.get(id(tensor))
        if at is None:
            return None
        index = next((i for i, m in enumerate(self.parts.matrices) if m.tensor is tensor), None)
        if index is None or not self.kept:
            return self.now[at]
        return self.now[at] + self.kept.here[index][0].float().sum(0).repeat(self.rank)

    def rows(self, flat: torch.Tensor, at: slice) -> torch.Tensor:
        """[r, .]: the part of a matrix in the array of all A, or of all V."""
        return flat[at].view(self.rank, -1)
