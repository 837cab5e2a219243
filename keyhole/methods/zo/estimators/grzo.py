"""GRZO's idea: each group of rows has its own direction, at the cost of a single direction's passes.

    rows of the step in q parts;  L_i = sum of the losses of part i / count of the whole step
    c_i = g_i = (L_i(w + eps z_i) - L_i(w - eps z_i)) / (2 eps)         the rows of 2 forward passes, however large q is

sum_i c_i z_i is unbiased like MeZO's estimate: E[c_i z_i] is the gradient of L_i, and these add up to that of L. Its
variance is smaller. With d weights, a gradient G of the whole loss and noise of variance v per row, b rows:

    one direction      E|update|^2 = d (|G|^2 + v / b)
    q directions       E|update|^2 = d (|G|^2 / q + v / b)

so it pays if the batch's gradient is more signal than noise. The paper uses z_i = U * (r_i s_i^T), one matrix U with
random signs per row, to run all rows in one pass with two products per layer. Here every z_i is drawn independently:
norms, biases and embeddings are as exact as matrices, and the journal's update is the same sum as for other estimators.
The price is a pair of perturbed copies per direction, 2 q x unit bytes written per step, and 2 q smaller launches.

A part is a run of adjacent rows (of questions, with loss: candidates) over all micro-batches of the step, so that
gradient accumulation gives the same parts as one large batch. Parts differ by at most one row; with fewer rows than
directions, the last directions have no rows, and a coefficient of 0.
"""

import torch

from keyhole.methods.zo.estimators.base import Estimate, Estimator


class GRZO(Estimator):
    """A direction per group of rows."""

    name, splits = "grzo", True

    def estimate(self, losses: torch.Tensor, memory: torch.Tensor) -> Estimate:
        projected = self.antithetic(losses)
        return Estimate(projected, projected, memory)

    def loss(self, losses: torch.Tensor) -> torch.Tensor:
        """The sum of the parts' losses, averaged over both signs."""
        return losses.view(self.directions, 2).sum(dim=0).mean()

    def length(self, power: float) -> float:
        """At most; less where the gradient is more signal than noise."""
        return power**0.5

    def ideal_rate(self, signal: float, power: float, curvature: float) -> float:
        """More directions divide the signal's share of the update's power; the share of the noise stays."""
        return signal / ((signal / self.directions + max(power - signal, 0.0)) * curvature)
