"""MeZO: both signs of each direction, on all rows.

    g_i = (L(w + eps z_i) - L(w - eps z_i)) / (2 eps)        c_i = g_i / q                          2 q forward passes

The second-order term of L cancels, so g_i is the slope along z_i up to eps^2. Averaging q directions divides the
variance of the update by q, at q times the passes: for a fixed number of passes more directions gain little.
"""

import torch

from keyhole.methods.zo.estimators.base import Estimate, Estimator


class MeZO(Estimator):
    """Antithetic pairs."""

    name = "mezo"

    def estimate(self, losses: torch.Tensor, memory: torch.Tensor) -> Estimate:
        projected = self.antithetic(losses)
        return Estimate(projected, projected / self.directions, memory)

    def length(self, power: float) -> float:
        return (power / self.directions) ** 0.5

    def ideal_rate(self, signal: float, power: float, curvature: float) -> float:
        """For c_i = g_i / q: sum c_i g_i is the signal, sum c_i^2 is power / q."""
        return self.directions * signal / (power * curvature)
