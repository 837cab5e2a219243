"""FZOO: one side of each direction and one unperturbed pass, and a step scaled by the spread of the losses.

    l_i = L(w + eps z_i),  l_0 = L(w)        s = sqrt(sum_i (l_i - mean l)^2 / (q - 1))             q + 1 forward passes
    c_i = (l_i - l_0) / (q s)                reported: g_i = (l_i - l_0) / eps

A direction costs one pass instead of two. s is about eps times the norm of the gradient, so the update is a normalised
step, which has the same length on steep and on flat surfaces, and eps cancels: the rate is the root mean square change
of a weight per step, times sqrt(q). z is -1 or +1 by default. If all l_i are equal, the update is zero. l_i - l_0 also
contains the curvature, eps^2/2 z_i^T H z_i, nearly the same for every direction: it adds a random direction to the
update, so eps must be small enough that slopes dominate.
"""

import torch

from keyhole.methods.zo.estimators.base import Estimate, Estimator, Pair


class FZOO(Estimator):
    """One-sided directions."""

    name = "fzoo"

    @property
    def pairs(self) -> list[Pair]:
        q = self.directions
        return [Pair(0, "clean"), *(Pair(i, "next" if i + 1 < q else "nothing") for i in range(1, q, 2))]

    def estimate(self, losses: torch.Tensor, memory: torch.Tensor) -> Estimate:
        clean, moved = losses[1], torch.cat([losses[:1], losses[2:]])
        rise, spread = moved - clean, moved.std()
        scaled = rise / (self.directions * spread)
        return Estimate(rise / self.eps, torch.where(spread > 0, scaled, torch.zeros_like(scaled)), memory)

    def length(self, power: float) -> float:
        return self.directions**-0.5

    def ideal_rate(self, signal: float, power: float, curvature: float) -> float:
        """MeZO's, times the spread of slopes; the curvature in each l_i - l_0 adds to the power of the update."""
        bent = (self.eps * curvature / 2) ** 2
        return self.directions * signal * power**0.5 / ((power + bent) * curvature)
