"""The interface of an estimator: which losses a step evaluates, and how they become the coefficients of its update.

    w <- w - lr (sum_i c_i z_i + weight_decay w)        i = 1 .. q        c = coefficients(losses)

Everything else is common: noise, streaming, the deferred update, the journal. A step evaluates its loss at *looks*,
perturbed points near w. One pass over a unit's weights writes its copies for two looks, so looks come in pairs:

    minus      w + eps z_i, w - eps z_i           next       w + eps z_i, w + eps z_{i+1}
    clean      w + eps z_i, w                     nothing    w + eps z_i alone

All looks of a step visit a unit together, so a streamed unit crosses the link once, whatever their number.

Rows. Most estimators evaluate every look on all rows of the step. One that sets `splits` divides the rows of the step
evenly among its directions: both looks of direction i use only the i-th part.

Memory. An estimator may keep `remembers` numbers from step to step, a float32 tensor on the device. They are part of
checkpoints and of every record of the journal, so a resumed run has the same bits. A step with non-finite losses
changes neither weights nor memory.
"""

from dataclasses import dataclass

import torch


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


@dataclass(frozen=True)
class Estimate:
    """The result of one step, on the device: the projected gradients g_1 .. g_q (reported), the coefficients
    c_1 .. c_q, and the numbers to remember."""

    projected: torch.Tensor
    coefficients: torch.Tensor
    memory: torch.Tensor


class Estimator:
    """One rule. It holds settings and no state: memory is an argument and a result."""

    name: str
    splits = False
    remembers = 0

    def __init__(self, directions: int, eps: float, clip: float | None = None, beta: float = 0.99) -> None:
        self.directions, self.eps, self.clip, self.beta = directions, eps, clip, beta

    @property
    def pairs(self) -> list[Pair]:
        """The looks of a step, in the order of their losses."""
        return [Pair(i) for i in range(self.directions)]

    def estimate(self, losses: torch.Tensor, memory: torch.Tensor) -> Estimate:
        """losses: one per look, each a mean over all rows of the step (for a split step: a part's share of it)."""
        raise NotImplementedError  # abstract

    def loss(self, losses: torch.Tensor) -> torch.Tensor:
        """The loss of the step, for the log: the mean over its looks."""
        return losses.mean()

    def ideal_rate(self, signal: float, power: float, curvature: float) -> float:
        """The rate at which the loss is expected to decrease fastest (rate_search.py). signal: |G|^2 of the gradient of
        the whole loss; power: mean square of a projected gradient; curvature: z^T H z."""
        raise NotImplementedError  # abstract

    def length(self, power: float) -> float:
        """The root mean square change of a weight by an update at the rate 1, for projected gradients of this mean
        square: sqrt(sum_i E[c_i^2])."""
        raise NotImplementedError  # abstract

    def antithetic(self, losses: torch.Tensor) -> torch.Tensor:
        """g_i = (l_i+ - l_i-) / (2 eps), clipped."""
        losses_q2 = losses.view(self.directions, 2)
        projected = (losses_q2[:, 0] - losses_q2[:, 1]) / (2 * self.eps)
        return projected if self.clip is None else projected.clamp(-self.clip, self.clip)
