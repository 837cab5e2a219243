"""learning_rate: auto. A rate from losses alone, measured in the first steps of a run, which change no weight.

An update u = sum_i c_i z_i at the rate r changes the loss by -r G.u + r^2/2 u^T H u, to second order. On average over
directions, with an independent estimate g' of each slope, that is

    -r sum_i E[c_i g'_i] + r^2/2 sum_i E[c_i^2] h        h = E[z^T H z]

which decreases fastest at r = sum_i E[c_i g'_i] / (h sum_i E[c_i^2]); twice that rate gains nothing. Three numbers
determine it for every estimator (Estimator.ideal_rate), each a mean over STEPS steps with one direction each:

    signal       E[a b]         a, b: the slopes of the two halves of the step's rows along the same z. Their noises are
                                independent, so the product is |G|^2 on average, however noisy a batch is
    power        E[g^2]         g: the slope of the whole step; |G|^2 and the noise of the rows
    curvature    sqrt(E[h^2])   h = (l(w + eps z) + l(w - eps z) - 2 l(w)) / eps^2, of each row by itself

Why the curvature of single rows, and not that of their mean: on a task that is new to a model, rows with right answers
have one sign of curvature and rows with wrong answers the other, because noise in the weights makes the model less
certain of both. The curvature of the mean is then arbitrary: for stories15M on SST-2 it is -1.5e4, which would allow
any rate, but the run diverges at 3e-5. The magnitude of a row's curvature, 1.25e5 there, shows how far a step may go
until slopes change, and is the same from eps = 3e-4 to 3e-3.

Reach. Slopes and curvatures are those within eps of w, and say nothing of points much further away. So a step is at
most REACH eps long, root mean square over the weights (Estimator.length), however flat the surface seems. On the
embedded model the slope is 8 and the curvature 110: the formula alone has 2e-3 to 3.4e-3, steps of 16 to 27 eps, at
which 5 of 6 runs of 300 steps diverge (LOG.md).

Directions of low rank (zo.rank). c_i^2 and z^T H z are not independent, as the formula above has it: both are large
where z has much of the same few inputs and outputs. For one matrix with H = S x C (S of outputs, C of inputs), z =
U V^T / sqrt(r), and a and b the shares of tr C and tr S along the gradient,

    E[g^2 z^T H z] = |G|^2 tr H (1 + 2 a b + (2 / r) (a + b + a b))        dense: without the last term

For a = b = 1/4 the best rate is r / (r + 1) of a dense one; for a = b = 1, r / (r + 2). The search uses r / (r + 1).
Each of its steps has a V of its own (those of the first periods), because the curvature differs from V to V.

Cost: 3 forward passes in each of STEPS steps: w + eps z, w - eps z and w. With small noisy batches `signal` is the
least accurate number: its share of the power is clamped between LEAST_SHARE and 1. Rounding in the losses adds to the
curvature, which errs towards small rates. A gradient shrinks while a model learns and the noise of the rows does not,
so the run uses CAUTION times the rate that is fastest now.

The sums are four numbers on the device. They are part of every record of the journal and of checkpoints: a run that is
stopped during or after its search resumes with the same bits. The host reads them once, when the search ends.
"""

import math

import torch

from keyhole.errors import UserError
from keyhole.methods.zo.estimators import MeZO, Pair
from keyhole.methods.zo.traits import SEARCH_STEPS as STEPS
from keyhole.model.batch import DeviceBatch

CAUTION, LEAST_SHARE, REACH = 0.3, 0.1, 8.0


class RateSearch:
    """The rate search of one run; found: the rate, once it is known."""

    remembers = 4  # steps, and sums of a b, g^2, h^2
    pairs = [Pair(0), Pair(0, "nothing", 0.0)]

    def __init__(self, estimator: MeZO, rank: int | None = None) -> None:
        self.estimator, self.rank, self.taken = estimator, rank, 0
        self.found: float | None = None
        self.why = ""
        self.lines: list[str] = []

    def measure(
        self, nll: list[torch.Tensor], batches: list[DeviceBatch], tally: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean losses of the three looks, the sums including this step). nll: of the passes, look by look."""
        eps, m, count = self.estimator.eps, len(batches), max(1, sum(b.loss.count for b in batches))
        looks = [zip(nll[i : i + m], batches, strict=True) for i in range(0, len(nll), m)]
        plus_R, minus_R, clean_R = (torch.cat([b.loss.by_group(x) for x, b in look]) for look in looks)
        count_R = torch.cat([b.loss.count_by_group() for b in batches])
        losses = torch.stack([plus_R.sum(), minus_R.sum(), clean_R.sum()]) / count
        half = -(-len(count_R) // 2)
        if half == len(count_R):  # one row, such as the last of an epoch: not counted
            if not self.taken:  # the first step is as large as most
                raise UserError(
                    "learning_rate: auto compares two halves of a step's rows, and this step has one; raise batch_size "
                    "or gradient_accumulation_steps, or set a number"
                )
            return losses, tally
        a, b = (
            (plus_R[part].sum() - minus_R[part].sum()) / (2 * eps * count_R[part].sum().clamp(min=1))
            for part in (slice(None, half), slice(half, None))
        )
        g = (losses[0] - losses[1]) / (2 * eps)
        of_row = len(count_R) / count  # a row's share of a mean over tokens is its sum over its own tokens
        h_R = (plus_R + minus_R - 2 * clean_R) / eps**2 * of_row
        return losses, tally + torch.stack([torch.ones_like(g), a * b, g * g, h_R.square().mean()])

    def estimate(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slope, and coefficients of an update that moves nothing."""
        return (losses[:1] - losses[1:2]) / (2 * self.estimator.eps), losses.new_zeros(self.estimator.directions)

    def note(self, tally: torch.Tensor) -> None:
        """Counts a step of the search. The last one reads the sums (steps of one row or with a non-finite loss are not
        in them, and others take their place)."""
        self.taken += 1
        if self.taken >= STEPS:
            self.read(tally)
            if self.found is not None:
                self.lines = [f"learning rate: {self.found:.2e}, found in {STEPS} steps: {self.why}"]

    def read(self, tally: torch.Tensor) -> None:
        """Reads the sums, of this run or of the run that it resumes."""
        steps, *sums = tally.tolist()
        self.taken = int(steps)
        if self.taken >= STEPS:
            product, square, bend = (total / steps for total in sums)
            self.found, self.why = chosen_rate(self.estimator, product, square, bend, self.rank)

    def describe(self) -> list[str]:
        """Lines for the start block."""
        if self.found is not None:
            return [f"learning rate: {self.found:.2e}, as found by this run: {self.why}"]
        left = STEPS - self.taken
        return [f"learning rate: found in the first {left} steps from losses alone (3 passes each; nothing moves)"]

    def news(self) -> list[str]:
        """The result, after the last step of the search; returned once."""
        told, self.lines = self.lines, []
        return told


def rate_share(rank: int) -> float:
    """The rate of directions of low rank, as a share of that of dense ones."""
    return rank / (rank + 1)


def chosen_rate(
    estimator: MeZO, product: float, square: float, bend: float, rank: int | None = None
) -> tuple[float, str]:
    """(rate, reason), from the means of a b, g^2 and h^2. rank: of the directions, if it is low."""
    power, curvature = max(square, 1e-30), math.sqrt(max(bend, 1e-30))
    share = min(max(product / power, LEAST_SHARE), 1.0)
    rate, far = CAUTION * estimator.ideal_rate(share * power, power, curvature), REACH * estimator.eps
    short = rate * estimator.length(power) > far
    rate = far / estimator.length(power) if short else rate
    end = f"a step of {REACH:g} eps" if short else f"{CAUTION:g} of the rate at which the loss falls fastest"
    low = "" if rank is None else f", times {rate_share(rank):.2f} for directions of rank {rank}"
    rate *= 1.0 if rank is None else rate_share(rank)
    why = (
        f"slope {math.sqrt(power):.3g}, of whose square {share:.0%} is shared by both halves of the rows; curvature "
        f"of a row {curvature:.3g}; {end}{low}"
    )
    return rate, why
