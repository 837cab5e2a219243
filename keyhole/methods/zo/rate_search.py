"""learning_rate: auto. A rate from losses alone, measured in the first steps of a run, in which nothing moves.

An update u = sum_i c_i z_i at the rate r changes the loss by -r G.u + r^2/2 u^T H u, to second order. On average over
directions, with an independent estimate g' of each slope, that is

    -r sum_i E[c_i g'_i] + r^2/2 sum_i E[c_i^2] h        h = E[z^T H z]

which falls fastest at r = sum_i E[c_i g'_i] / (h sum_i E[c_i^2]); twice that rate gains nothing. Three numbers tell it
for every estimator (Estimator.ideal_rate), each a mean over STEPS directions, one per step:

    signal       E[a b]      a, b: the slopes of the two halves of the step's rows along the same z. Their noises are
                             independent, so the product is |G|^2 on average, however noisy a batch is
    power        E[g^2]      g: the slope of the whole step; |G|^2 and the noise of the rows
    curvature    E[h]        h = (L(w + eps z) + L(w - eps z) - 2 L(w)) / eps^2

Cost: 3 forward passes in each of STEPS steps. Small noisy batches make `signal` the weakest of them: its share of the
power is taken to be at least LEAST_SHARE, and never above 1. Where the curvature does not stand out from its own noise
(below SURE standard errors; it may even be negative) it is taken to be SURE standard errors, the most that the
measurement allows. A gradient shrinks while a model learns and the noise of the rows does not, so the run takes
CAUTION of what is fastest now.

The sums are five numbers on the device. They are part of every record of the journal and of checkpoints: a run that is
stopped in its search, or after it, goes on to the bit. The host reads them once, when the search ends.
"""

import math

import torch

from keyhole.errors import UserError
from keyhole.methods.zo.estimators.base import Estimator, Pair
from keyhole.methods.zo.parts import sample_count, split
from keyhole.model.batch import Batch, DeviceBatch

STEPS = 24
CAUTION, LEAST_SHARE, SURE = 0.3, 0.1, 2.0


class RateSearch:
    """The search of one run; found: the rate, once it is known."""

    remembers = 5  # steps, sums of a b, g^2, h, h^2
    pairs = [Pair(0), Pair(0, "nothing", 0.0)]
    looks = 3

    def __init__(self, estimator: Estimator) -> None:
        self.estimator, self.taken = estimator, 0
        self.found: float | None = None
        self.why = ""
        self.lines: list[str] = []

    def halves(self, batches: list[Batch]) -> list[Batch]:
        """The rows of a step in two halves, one after the other."""
        if sum(map(sample_count, batches)) < 2:
            raise UserError(
                "learning_rate: auto compares two halves of a step's rows, and this step has one; raise batch_size or "
                "gradient_accumulation_steps, or set a number"
            )
        first, second = split(batches, 2)
        self.first_pieces = len(first)
        return first + second

    def measure(
        self, sums: torch.Tensor, batches: list[DeviceBatch], tally: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(slope of the step [1], the sums with this step in them). sums: [looks, pieces] of losses."""
        eps, cut = self.estimator.eps, self.first_pieces
        counts = [max(1, sum(b.loss_count for b in part)) for part in (batches[:cut], batches[cut:])]
        a = (sums[0, :cut].sum() - sums[1, :cut].sum()) / (2 * eps * counts[0])
        b = (sums[0, cut:].sum() - sums[1, cut:].sum()) / (2 * eps * counts[1])
        plus, minus, clean = (sums.sum(dim=1) / sum(counts)).unbind()
        g, h = (plus - minus) / (2 * eps), (plus + minus - 2 * clean) / eps**2
        return g.view(1), tally + torch.stack([torch.ones_like(g), a * b, g * g, h, h * h])

    def note(self, tally: torch.Tensor) -> None:
        """A step of the search was made. The last one reads the sums (steps with a loss that was not finite are not in
        them, and are made up for)."""
        self.taken += 1
        if self.taken >= STEPS:
            self.read(tally)
            if self.found is not None:
                self.lines = [f"learning rate: {self.found:.2e}, found in {STEPS} steps: {self.why}"]

    def read(self, tally: torch.Tensor) -> None:
        """Takes the sums as they are, of this run or of one that it goes on from."""
        steps, *sums = tally.tolist()
        self.taken = int(steps)
        if self.taken >= STEPS:
            self.found, self.why = chosen_rate(self.estimator, [x / steps for x in sums])

    def describe(self) -> list[str]:
        """For the start block."""
        if self.found is not None:
            return [f"learning rate: {self.found:.2e}, as found by this run: {self.why}"]
        left = STEPS - self.taken
        return [f"learning rate: found in the first {left} steps from losses alone (3 passes each; nothing moves)"]

    def news(self) -> list[str]:
        """What was found in the last step, told once."""
        told, self.lines = self.lines, []
        return told


def chosen_rate(estimator: Estimator, means: list[float]) -> tuple[float, str]:
    """(rate, why): from the means of a b, g^2, h, h^2."""
    product, power, curvature, square = means
    error = math.sqrt(max(square - curvature**2, 0.0) / STEPS)
    power = max(power, 1e-30)
    share = min(max(product / power, LEAST_SHARE), 1.0)
    bend = max(curvature, SURE * error, 1e-30)
    rate = CAUTION * estimator.ideal_rate(share * power, power, bend)
    sure = "" if bend == curvature else f" (measured {curvature:.2g}, below its noise)"
    why = (
        f"slope {math.sqrt(power):.3g}, of whose square {share:.0%} is shared by both halves of the rows; curvature "
        f"{bend:.3g}{sure}; {CAUTION:g} of the rate at which the loss falls fastest"
    )
    return rate, why
