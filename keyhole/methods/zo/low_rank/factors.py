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

    folded    W <- round(W + A V_k^T / sqrt(r)), once per period (merge.py): it rounds less often than dense steps, by a
              factor of `refresh`
    kept      as r more terms beside W, which never changes and so may be frozen in any format: k r terms after k
              periods, by which all passes multiply. A run of many steps takes longer periods (zo.refresh)

Kept terms are float32 in host memory as they were learned; passes use a device copy in the dtype of compute. Their
places are the first rows of a *room* for each matrix, whose other rows are zeros and add nothing. If it is full, one
for STEP more terms takes its place: so passes read the same addresses for several periods, and a CUDA graph
(../recorded_step.py) is valid as long as `version` is the same.

Bytes, for n numbers in all A and vectors, m in all V, L looks, b bytes per number in compute:
4 n + 4 L n + b m; 4 n + b m more during a fold; for each kept period b (n + m), and 4 n on the host.
"""

import weakref
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.zo.low_rank.parts import Parts, find_parts, vector_at
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.update import Pending
from keyhole.model.model import Model
from keyhole.model.structure.layout import ALIGN, FlatTensor, Unit
from keyhole.model.weights.format import PACKED

Rows = tuple[torch.Tensor, torch.Tensor]  # a [K, O], v [K, I]
STEP = 16  # terms by which a room grows; products are fast with multiples of 8


@dataclass(frozen=True)
class Fold:
    """What a period has learned, to be added to the weights. step: for its rounding bits."""

    a: torch.Tensor
    v: torch.Tensor
    step: int


class Kept:
    """The terms of all earlier periods of one model. guided: V cannot be drawn again, and is part of checkpoints."""

    def __init__(self, parts: Parts, dtype: torch.dtype, device: torch.device, guided: bool, version: int = 0) -> None:
        self.parts, self.guided, self.version = parts, guided, version
        self.periods: list[torch.Tensor] = []  # all A of each, on the host
        self.vs: list[torch.Tensor] = []  # and all V, if guided
        empty = torch.empty(0, dtype=dtype, device=device)
        self.rooms: list[Rows] = [(empty.view(0, m.outputs), empty.view(0, m.inputs)) for m in parts.matrices]

    @property
    def terms(self) -> int:
        """Of a matrix."""
        return len(self.periods) * self.parts.rank

    def add(self, a: torch.Tensor, v: torch.Tensor) -> None:
        """Adds a period: all its A in float32, and V as it was used."""
        begin, rank = self.terms, self.parts.rank
        self.periods.append(a.to("cpu", torch.float32, copy=True))
        if self.guided:
            self.vs.append(v.to("cpu", copy=True))
        grows = bool(self.rooms) and self.terms > len(self.rooms[0][0])
        self.version += grows
        for i, matrix in enumerate(self.parts.matrices):
            if grows:  # one matrix at a time, so that little is held twice
                self.rooms[i] = _roomy(self.rooms[i][0], self.terms), _roomy(self.rooms[i][1], self.terms)
            self.rooms[i][0][begin : self.terms] = a[matrix.a].view(rank, -1)
            self.rooms[i][1][begin : self.terms] = v[matrix.v].view(rank, -1)


class Factors:
    """The factors of one model, as numbers."""

    def __init__(self, model: Model, own: ZOConfig, pairs: int) -> None:
        """own: filled, with a rank. pairs: the most pairs of looks of a step."""
        assert own.rank is not None and own.distribution is not None
        self.model: Model = weakref.proxy(model)  # which holds this object, by its layers
        self.noise: dict[str, Any] = {"seed": own.seed, "distribution": own.distribution}
        self.rank, self.refresh, self.folds = own.rank, own.refresh, own.fold
        self.rounding = own.rounding
        self.parts: Parts = find_parts(model, own.rank)
        self.units = {unit.index for unit in model.layout.of_kind("block")}
        if own.fold and any(model.engine.homes[i].dtype == PACKED for i in self.units):
            raise UserError("wire: weights that are packed are not rounded anew by zo.rank; set zo.fold=false")
        device = model.device
        self.now = torch.zeros(self.parts.numel, device=device)
        wide = -(-self.parts.numel // ALIGN) * ALIGN  # aligns every look for wide memory accesses
        self.looks = torch.empty(2 * pairs, wide, device=device)[:, : self.parts.numel]
        self.kept = Kept(self.parts, model.dtype, device, own.guide is not None)
        self.steps, self.v = 0, self.draw_v(0)  # number of steps done; v of the period that they lead to
        self.changed = torch.zeros((), dtype=torch.int64, device=device)
        self.found_for: int | None = None  # the period that V was found for (guide.py)
        for vector in self.parts.vectors:
            vector_at(self.now, vector).copy_(model.home(vector.tensor))

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

    def perturb(self, number: int, how: ops.ZOStep) -> None:
        """Computes the looks of a pair. how: its step, eps, direction, and what is beside it."""
        plus, minus = self.looks[2 * number : 2 * number + 2]
        ops.zo_flat_(self.now, plus, minus, replace(how, offset=self.parts.start))

    def update(self, pending: Pending) -> list[Fold]:
        """Applies the update of a finished step. Returns the period that it ends, if that is to be folded."""
        how = pending.added_to(ops.ZOStep(self.parts.start, **self.noise), 0.0, self.changed.zero_())
        ops.zo_flat_(self.now, None, None, how)
        self.steps = cast(int, pending.step) + 1
        if self.steps % self.refresh:
            return []
        a, v = self.now[: self.parts.a_numel].clone(), self.v.clone()
        if not self.folds:
            self.kept.add(a, v)
        self.now[: self.parts.a_numel].zero_()
        self.v.copy_(self.draw_v(self.period))  # in place: CUDA graphs use its address
        return [Fold(a, v, self.steps)] if self.folds else []

    # -- weights at home -------------------------------------------------------------------------------------------

    def is_behind(self, unit: Unit) -> bool:
        """Whether the unit's home lacks the current values of vectors."""
        return self.steps > 0 and bool(self.parts.of(unit)[1])

    def learned(self, index: int) -> Rows | None:
        """All terms of a matrix that its home lacks, oldest first, in float32 on the device; None if it lacks none."""
        matrix, kept, a, v = self.parts.matrices[index], self.kept, [], []
        if kept.periods:
            a += [self.rows(period, matrix.a).to(self.now.device) for period in kept.periods]
            v.append(kept.rooms[index][1][: kept.terms].float())
        if self.steps % self.refresh:
            a.append(self.rows(self.now, matrix.a))
            v.append(self.rows(self.v, matrix.v).float())
        return (torch.cat(a), torch.cat(v)) if a else None

    def sample(self, tensor: FlatTensor) -> torch.Tensor | None:
        """What is currently learned of a tensor beside its home; None if it is trained at home."""
        for vector in self.parts.vectors:
            if vector.tensor is tensor:
                return self.now[vector.at]
        for matrix, (a_kO, _) in zip(self.parts.matrices, self.kept.rooms, strict=True):
            if matrix.tensor is tensor:
                return self.now[matrix.a] + a_kO.float().sum(0).repeat(self.rank)
        return None

    def rows(self, flat: torch.Tensor, at: slice) -> torch.Tensor:
        """[r, .]: the part of a matrix in the array of all A, or of all V."""
        return flat[at].view(self.rank, -1)


def room_for(terms: int) -> int:
    """The number of rows of a room."""
    return -(-terms // STEP) * STEP


def _roomy(rows: torch.Tensor, terms: int) -> torch.Tensor:
    """A copy of these rows, with rows of zeros after them, in a room for so many terms."""
    room = rows.new_zeros(room_for(terms), rows.shape[1])
    room[: len(rows)] = rows
    return room
