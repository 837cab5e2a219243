"""Notices in the first steps of plain gradient descent that they are too long, and names a rate that is not.

A step of length lr ||g|| along the gradient lowers the loss, to first order, by lr ||g||^2; with max_grad_norm = c, by
lr ||g|| min(||g||, c). A loss cannot fall by more than itself, so a multiple of it means that the step goes far beyond
where the slope holds. SmolLM2-135M, float32, 4 rows of SST-2 per step, `lomo` at 5e-3, steps 1 to 3: 11, 18 and 59
times the loss where a question was asked before the row, and the loss went from 3.4 to 12 by step 7; 2.2, 4.3 and 2.9
times where the row was followed by "It was", and the loss fell at once. With the question, at 1e-3, the first was 2.9,
and the loss fell from 4.3 to 0.4 in a step and was 0.3 after 10; with max_grad_norm=1 it was 2.5 after 10. So the rate
that is named makes it GOOD, and comes before clipping.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from keyhole.report.entries import Entry, finite

STEPS = 3
TIMES, AT_LEAST = 5.0, 1.0  # the predicted fall: so many times the loss, and so much
GOOD = 2.0  # times the loss


@dataclass
class Overshoot:
    """For methods whose step is the rate times the gradient (Traits.descends)."""

    max_grad_norm: float | None = None
    said: bool = False

    def recall(self, entries: Iterable[Entry]) -> None:
        """Takes the steps before a resume; what is found there was said then."""
        for entry in entries:
            loss, rate, norm = (finite(entry.get(name)) for name in ("loss", "learning_rate", "grad_norm"))
            if loss is not None and rate is not None and norm is not None:
                self.note(entry["step"], loss, rate, norm)

    def note(self, step: int, loss: float, rate: float, norm: float) -> str | None:
        """The warning, once, in one of the first steps of a run."""
        length = norm if self.max_grad_norm is None else min(norm, self.max_grad_norm)
        fall = rate * norm * length
        if self.said or step > STEPS or fall <= max(TIMES * loss, AT_LEAST):
            return None
        if not math.isfinite(fall):  # such an update is left out (guard.py): a loss scale that is too high, for one
            return None
        self.said = True
        lower = f"learning_rate={GOOD * max(loss, AT_LEAST / TIMES) / (norm * length):.0e}"
        clip = "lower it" if self.max_grad_norm is not None else "or clip: max_grad_norm=1 (a second backward pass)"
        return (
            f"warning: step {step}: the gradient's norm is {norm:.3g}, for which learning_rate={rate:.2g} is too high: "
            f"its slope would take {fall:.3g} off a loss of {loss:.3g}, so the loss may rise, or the run diverge; set "
            f"{lower}, {clip}"
        )
