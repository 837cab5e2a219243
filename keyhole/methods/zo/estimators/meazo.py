"""MEAZO: antithetic pairs, divided by the root of one second moment for all weights.

    g_i as MeZO;  v <- beta v + (1 - beta) mean_i g_i^2;  n <- beta n + (1 - beta)        v, n = 0 before the first step
    c_i = g_i / (q sqrt(v / n))                                                          2 q forward passes

This is Adam's second moment over projected gradients: one number, since g is one number per direction. v / n is Adam's
bias correction. Steps have about the same length throughout the run, so one rate suits models whose gradients differ by
orders of magnitude. Remembered: v and n.
"""

import torch

from keyhole.methods.zo.estimators.base import Estimate, Estimator


class MEAZO(Estimator):
    """Pairs with a scalar second moment."""

    name, remembers = "meazo", 2

    def estimate(self, losses: torch.Tensor, memory: torch.Tensor) -> Estimate:
        projected, beta = self.antithetic(losses), self.beta
        new = torch.stack([projected.square().mean(), torch.ones_like(projected[0])])
        moments = memory * beta + new * (1 - beta)
        root = (moments[0] / moments[1]).sqrt()
        scaled = projected / (self.directions * root)
        return Estimate(projected, torch.where(root > 0, scaled, torch.zeros_like(scaled)), moments)

    def length(self, power: float) -> float:
        return self.directions**-0.5

    def ideal_rate(self, signal: float, power: float, curvature: float) -> float:
        """MeZO's, times the root of the second moment."""
        return self.directions * signal / (power**0.5 * curvature)
