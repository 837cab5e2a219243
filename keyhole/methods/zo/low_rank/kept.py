"""What earlier periods have learned, kept beside weights that never change (zo.fold=false).

    W + sum_j A_j^T V_j        j over all periods before the present one: k r terms after k periods

Every period adds its r terms, and all passes multiply by all terms, so the cost would grow with the run. After every
`periods` periods (zo.fold_periods; it depends only on the step) all terms are folded into one sum with fewer terms: the
largest singular triples of each matrix (ops/lowrank/compress.py). They are never folded into the weights, whose grid
may be coarse:

    M = [sum before] + [periods since]   ->   M' with the fewest terms for which   lost^2 + |M - M'|^2 <= (error |M|)^2

in the Frobenius norm. lost^2 is the energy that all folds before have dropped. Squares add up, because what a fold
drops is orthogonal to what it keeps, and nearly orthogonal to periods that are drawn later. So the sum that a run uses
stays within about `error` (zo.fold_error) of everything that it has learned: about, because of that "nearly". If fewer
terms would exceed the bound, the terms stay, and the rank is whatever that requires. The bound is of the sum at the
fold: where a later sum is smaller, what was lost is a larger share of it, and nothing more is dropped until it has
grown. A fold keeps at most min(O, I) terms. The log has the measured error and the ranks.

Folds work on float32 tensors on the host: A of each period as it was learned, and the sums; passes use device copies in
the dtype of compute. So rounding errors of 16 bits do not accumulate either. V of a period is drawn again. Another
machine may round a fold otherwise: ranks take the leader's sums, and records of the journal have a checksum of them,
so that a replay can say whether its sums are those of the run.

On the device the terms of a matrix are the first rows of a *room*, whose other rows are zeros and add nothing. A period
is written into the room; if it is full, a room for STEP more terms takes its place. So passes read the same addresses
for several periods, and a CUDA graph (../recorded_step.py) is valid as long as `version` is the same.

Bytes for K terms of a matrix: b K (O + I) on the device, K rounded up to a multiple of STEP; on the host 4 r O per
period and 4 K (O + I) per sum.
"""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.zo.low_rank.parts import Matrix, Parts
from keyhole.ops.lowrank.compress import compressed
from keyhole.ranks import Ranks

Rows = tuple[torch.Tensor, torch.Tensor]  # a [K, O], v [K, I]
MOST_TERMS = 2048  # of a matrix between two folds
STEP = 16  # terms by which a room grows; products are fast with multiples of 8
VERSIONS = itertools.count()


@dataclass(frozen=True)
class FoldedPeriods:
    """A fold, for the log: its step, the number of terms before and after over all matrices, and the largest share of a
    matrix's norm that all folds so far have lost."""

    steps: int
    before: int
    ranks: tuple[int, ...]
    error: float

    def line(self, most: float) -> str:
        """A line for the user."""
        least, largest, mean = min(self.ranks), max(self.ranks), sum(self.ranks) / len(self.ranks)
        return (
            f"step {self.steps}: earlier periods folded into a sum of rank {mean:.1f} ({least} to {largest}; before "
            f"{self.before / len(self.ranks):.1f}), {self.error:.2e} of its norm lost so far (zo.fold_error {most:g})"
        )


class Kept:
    """The kept terms of one model. periods: between two folds; None: never. guided: V cannot be drawn again."""

    def __init__(
        self, parts: Parts, dtype: torch.dtype, periods: int | None, error: float, guided: bool, ranks: Ranks
    ) -> None:
        self.guided, self.ranks = guided, ranks
        self.parts, self.dtype, self.every, self.most = parts, dtype, periods, error
        check_folds(parts, periods)
        self.rooms: list[Rows] = []  # by matrix, on the device, as passes use them: the terms, then rows of zeros
        self.counts: list[int] = []  # by matrix, the number of terms
        self.version = next(VERSIONS)  # of the rooms: another one when any of them is replaced
        self.periods: list[torch.Tensor] = []  # all A of each period since the last fold, on the host
        self.vs: list[torch.Tensor] = []  # and all V, if guided
        self.sums: list[Rows] = []  # by matrix, on the host
        self.lost: list[float] = [0.0] * len(parts.matrices)  # by matrix, the energy that folds have dropped
        self.last: FoldedPeriods | None = None
        self.lines: list[str] = []
        self.checksum = 0.0  # of the sums, in 24 bits

    def emptied(self) -> "Kept":
        """The same without any terms."""
        return Kept(self.parts, self.dtype, self.every, self.most, self.guided, self.ranks)

    def __bool__(self) -> bool:
        return bool(self.rooms)

    @property
    def here(self) -> list[Rows]:
        """The terms by matrix, on the device, in the dtype of compute."""
        return [(a[:k], v[:k]) for k, (a, v) in zip(self.counts, self.rooms, strict=True)]

    @property
    def rank(self) -> float:
        """Mean number of terms per matrix."""
        return sum(self.counts) / max(1, len(self.counts))

    def add(self, a: torch.Tensor, v: torch.Tensor) -> None:
        """Adds a period: all its A in float32, and V as it was used."""
        self.periods.append(a.to("cpu", torch.float32, copy=True))
        if self.guided:
            self.vs.append(v.to("cpu", copy=True))
        if not self.rooms:
            self._hold([(a.new_empty(0, m.outputs), v.new_empty(0, m.inputs)) for m in self.parts.matrices], a.device)
        for i, matrix in enumerate(self.parts.matrices):
            k, end = self.counts[i], self.counts[i] + self.parts.rank
            if end > len(self.rooms[i][0]):  # one matrix at a time, so that little is held twice
                self.rooms[i] = _roomy(self.rooms[i][0][:k], end), _roomy(self.rooms[i][1][:k], end)
                self.version = next(VERSIONS)
            self.rooms[i][0][k:end], self.rooms[i][1][k:end] = self._rows(a, matrix.a), self._rows(v, matrix.v)
            self.counts[i] = end

    def _hold(self, terms: list[Rows], device: torch.device) -> None:
        """Copies these terms of each matrix to rooms on the device."""
        self.counts, self.version = [len(a) for a, _ in terms], next(VERSIONS)
        held = ([rows.to(device, self.dtype) for rows in both] for both in terms)
        self.rooms = [(_roomy(a, len(a)), _roomy(v, len(v))) for a, v in held]

    def _rows(self, flat: torch.Tensor, at: slice) -> torch.Tensor:
        return flat[at].view(self.parts.rank, -1)

    def learned(self, index: int) -> Rows:
        """All terms of a matrix in float32, on the device."""
        matrix, v_KI = self.parts.matrices[index], self.rooms[index][1][: self.counts[index]]
        a = [self._rows(period, matrix.a) for period in self.periods]
        if not self.sums:
            return torch.cat(a).to(v_KI.device), v_KI.float()
        a_sum, v_sum = self.sums[index]
        v = torch.cat([v_sum.to(v_KI.device), v_KI[len(v_sum) :].float()])
        return torch.cat([a_sum, *a]).to(v_KI.device), v

    def end_period(self, steps: int, refresh: int) -> None:
        """Called after a period was added: folds if it is time."""
        if self.every is not None and steps // refresh % self.every == 0:
            self.fold(steps)

    @torch.no_grad()
    def fold(self, steps: int) -> None:
        """Folds everything into one sum per matrix."""
        before, device = sum(self.counts), self.rooms[0][0].device
        sums, self.lost, errors = self.ranks.from_leader(self._folded)
        self._hold(sums, device)
        self._set_sums(sums)
        self.periods, self.vs = [], []
        self.last = FoldedPeriods(steps, before, tuple(len(a) for a, _ in sums), max(errors))
        self.lines.append(self.last.line(self.most))

    def _folded(self) -> tuple[list[Rows], list[float], list[float]]:
        """By matrix: the terms that the bound requires, the energy that is lost so far, and its share of the norm."""
        sums, losses, errors = [], [], []
        for index, (matrix, lost) in enumerate(zip(self.parts.matrices, self.lost, strict=True)):
            a_mO, v_mI, own, norm = compressed(*self.learned(index), self.most, lost, _scale(matrix, self.parts.rank))
            losses.append(lost + own * own)
            errors.append(math.sqrt(losses[-1]) / norm if norm else 0.0)
            sums.append((a_mO, v_mI))
        return sums, losses, errors

    def _set_sums(self, sums: list[Rows]) -> None:
        self.sums, checksum = sums, 0
        for rows in itertools.chain.from_iterable(sums):
            checksum = zlib.crc32(rows.numpy().data, checksum)
        self.checksum = float(checksum & 0xFFFFFF)  # exact in float32

    def metrics(self) -> dict[str, float]:
        """Numbers for the log of every step."""
        return {"kept_rank": self.rank, "fold_error": 0.0 if self.last is None else self.last.error}

    def news(self) -> list[str]:
        """Lines about folds; each is returned once."""
        told, self.lines = self.lines, []
        return told

    # -- checkpoints (state.py) ------------------------------------------------------------------------------------

    def to_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`kept` [periods, A]; after a fold its sums, in the order of matrices, and the lost energy."""
        if self.periods:
            yield "kept", torch.stack(self.periods)
        if self.vs:
            yield "kept_v", torch.stack(self.vs)
        for i, (a_mO, v_mI) in enumerate(self.sums):
            yield f"sum.{i}.a", a_mO
            yield f"sum.{i}.v", v_mI
        if self.last is not None:
            last = self.last
            yield "folds", torch.tensor([last.steps, last.before, last.error, *self.lost], dtype=torch.float64)

    def take_sums(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Loads the sums of a checkpoint; its periods are then added one by one."""
        if "folds" not in state:
            return
        steps, before, error, *self.lost = state["folds"].tolist()
        sums = []
        for i, matrix in enumerate(self.parts.matrices):
            a_mO, v_mI = (state[f"sum.{i}.{name}"].to("cpu", torch.float32) for name in "av")
            if len(a_mO) != len(v_mI) or (a_mO.shape[1], v_mI.shape[1]) != (matrix.outputs, matrix.inputs):
                raise ValueError(f"a sum of {tuple(a_mO.shape)} and {tuple(v_mI.shape)} for {matrix.tensor.name}")
            sums.append((a_mO.contiguous(), v_mI.contiguous()))
        self._hold(sums, device)
        self._set_sums(sums)
        self.last = FoldedPeriods(int(steps), int(before), tuple(len(a) for a, _ in self.sums), error)


def check_folds(parts: Parts, periods: int | None) -> None:
    """UserError if a fold would take minutes for a large model on a GPU; the time grows with the cube."""
    side, terms = max(min(m.inputs, m.outputs) for m in parts.matrices), (periods or 0) * parts.rank
    if min(side, terms) > MOST_TERMS:
        raise UserError(
            f"zo.fold_periods: {periods} periods of rank {parts.rank} are {terms} terms of a matrix, and a fold "
            f"of more than {MOST_TERMS} takes too long; set zo.fold_periods={MOST_TERMS // parts.rank}, or lower "
            "zo.rank"
        )


def room_for(terms: int) -> int:
    """The number of rows of a room."""
    return -(-terms // STEP) * STEP


def _roomy(rows: torch.Tensor, terms: int) -> torch.Tensor:
    """A copy of these rows, with rows of zeros after them, in a room for so many terms."""
    room = rows.new_zeros(room_for(terms), rows.shape[1])
    room[: len(rows)] = rows
    return room


def _scale(matrix: Matrix, rank: int) -> float:
    """The norm of a row of v in the sum: about that of a row of V / sqrt(r), so that 16 bits represent a and v equally
    well; a power of two, so that scaling rounds nothing."""
    return 2.0 ** (max(1, matrix.inputs // rank).bit_length() // 2)
