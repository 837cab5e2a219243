"""Estimators: which losses a step evaluates, and how they become the coefficients of its update.

    w <- w - lr (sum_i c_i z_i + weight_decay w)        i = 1 .. q

Everything else is common: noise, streaming, the deferred update, the journal. A step evaluates its loss at *looks*,
perturbed points near w. One pass over a unit's weights writes its copies for two looks, so looks come in pairs:

    minus      w + eps z_i, w - eps z_i           next       w + eps z_i, w + eps z_{i+1}
    clean      w + eps z_i, w                     nothing    w + eps z_i alone

MeZO: both signs of each direction, 2 q forward passes

    g_i = (L(w + eps z_i) - L(w - eps z_i)) / (2 eps)        c_i = g_i / q

The second-order term of L cancels, so g_i is the slope along z_i up to eps^2. Averaging q directions divides the
variance of the update by q, at q times the passes: for a fixed number of passes more directions gain little.

FZOO: one side of each direction and one unperturbed pass, and a step scaled by the spread of the losses, q + 1 passes

    l_i = L(w + eps z_i),  l_0 = L(w)        s = sqrt(sum_i (l_i - mean l)^2 / (q - 1))
    c_i = (l_i - l_0) / (q s)                reported: g_i = (l_i - l_0) / eps

s is about eps times the norm of the gradient, so the update is a normalised step, which has the same length on steep
and on flat surfaces, and eps cancels: the rate is the root mean square change of a weight per step, times sqrt(q). z is
-1 or +1 by default. If all l_i are equal, the update is zero. l_i - l_0 also contains the curvature, eps^2/2 z_i^T H
z_i, nearly the same for every direction: it adds a random direction to the update, so eps must be small enough that
slopes dominate.

Passes are numbered by look, each on all rows, and within a look by batch. Every rank has its share of the batches
(keyhole/ranks), which may be empty.

    look 0          look 1          look 2 ...        pair 0 is looks 0 and 1, written in one pass over a unit's weights
    0 .. m - 1      m .. 2 m - 1    2 m ..
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from keyhole.model.batch import Batch, DeviceBatch
from keyhole.model.model import Model
from keyhole.model.objective import Candidates, loss_of
from keyhole.ranks import Ranks


@dataclass(frozen=True)
class Pair:
    """Two looks (or one) whose copies are written together. beside: see above; scale: of eps (0: unperturbed)."""

    direction: int
    beside: str = "minus"
    scale: float = 1.0

    @property
    def looks(self) -> int:
        """The number of looks of the pair."""
        return 1 if self.beside == "nothing" else 2


class MeZO:
    """Antithetic pairs."""

    def __init__(self, directions: int, eps: float, clip: float | None) -> None:
        self.directions, self.eps, self.clip = directions, eps, clip

    @property
    def pairs(self) -> list[Pair]:
        """The looks of a step, in the order of their losses."""
        return [Pair(i) for i in range(self.directions)]

    def estimate(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The projected gradients g_1 .. g_q, and the coefficients c_1 .. c_q, on the device. losses: one per look,
        each a mean over all rows of the step."""
        losses_q2 = losses.view(self.directions, 2)
        projected = (losses_q2[:, 0] - losses_q2[:, 1]) / (2 * self.eps)
        projected = projected if self.clip is None else projected.clamp(-self.clip, self.clip)
        return projected, projected / self.directions


class FZOO(MeZO):
    """One-sided directions."""

    @property
    def pairs(self) -> list[Pair]:
        q = self.directions
        return [Pair(0, "clean"), *(Pair(i, "next" if i + 1 < q else "nothing") for i in range(1, q, 2))]

    def estimate(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        clean, moved = losses[1], torch.cat([losses[:1], losses[2:]])
        rise, spread = moved - clean, moved.std()
        scaled = rise / (self.directions * spread)
        return rise / self.eps, torch.where(spread > 0, scaled, torch.zeros_like(scaled))


ESTIMATORS: dict[str, type[MeZO]] = {"mezo": MeZO, "fzoo": FZOO}


@dataclass(frozen=True)
class Looks:
    """The perturbed points at which a step evaluates its loss, and its batches."""

    pairs: list[Pair]
    batches: list[DeviceBatch]  # those of this rank
    loss_count: int  # the number that the loss of the step is divided by
    count: int  # number of batches over all ranks

    @property
    def looks(self) -> int:
        """The number of looks."""
        return sum(pair.looks for pair in self.pairs)

    @cached_property
    def passes(self) -> list[DeviceBatch]:
        """The batch of every pass."""
        return self.batches * self.looks

    @cached_property
    def visits(self) -> list[tuple[int, Pair, list[range]]]:
        """(number, pair, passes at each of its looks); none on a rank without batches."""
        found, begin, size = [], 0, len(self.batches)
        for p, pair in enumerate(self.pairs if size else ()):
            found.append((p, pair, [range(begin + i * size, begin + (i + 1) * size) for i in range(pair.looks)]))
            begin += pair.looks * size
        return found


def look_at(model: Model, pairs: list[Pair], batches: list[Batch], ranks: Ranks) -> Looks:
    """The looks of a step."""
    sent = model.send(ranks.share(batches), **send_options(batches))
    return Looks(pairs, sent, ranks.total(sum(batch.loss.count for batch in sent)), len(batches))


def send_options(batches: list[Batch]) -> dict[str, bool]:
    """Options of Model.send: candidates may share rows or be joined (model/rows.py)."""
    by_candidates = any(loss_of(batch) is Candidates for batch in batches)
    return {"shares": by_candidates, "joins": by_candidates}
