"""Notices that the training loss has risen far: a run that has diverged to a plateau looks healthy.

Losses of steps jump: those of small batches by their rows, those of a diverging run by several times their value, so
that neither a single step nor a few in a row tell much. What is compared are the quartiles of the last WINDOW losses,
with those of the window whose median was the lowest so far (best):

    risen   if median > max(2 best, best + 1)    and    lower quartile > upper quartile of the best window

The second condition holds back where losses are so noisy that two windows of the same run differ by a factor of 2. A
run may diverge in its first step, so up to step 2 WINDOW the first loss is compared with as well, and the window may be
shorter. That is one step, which may be low by chance: the median must be 3 times as high, the lower quartile twice.

Losses that are drawn again and again from one distribution, 1,000 runs of 200 steps each, warn in

    normal, mean and standard deviation    0.7, 0.3: 0    11.5, 1.5: 0    2.5, 0.6: 2    2.5, 0.9: 38    1.2, 0.6: 86
    lognormal, median and sigma            1, 0.5: 9      2, 0.5: 27      1, 0.8: 65     2, 0.8: 116

so only rows one by one, whose losses differ by half of their mean, bring false alarms in a tenth of such runs.

It depends on the losses alone, and a resumed run reads those of earlier steps from run/metrics.jsonl: a run that was
stopped warns at the same step as one that was not.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from keyhole.report.entries import Entry, finite

WINDOW, LEAST = 32, 5  # losses
RISE, RISE_FROM_FIRST, RISE_AT_LEAST = 2.0, 3.0, 1.0


class Quartiles(NamedTuple):
    """Of the losses up to a step."""

    step: int
    low: float
    middle: float
    high: float


class Divergence:
    """The losses of a run, step by step."""

    def __init__(self) -> None:
        self.window: deque[float] = deque(maxlen=WINDOW)
        self.count = 0
        self.first: Quartiles | None = None
        self.best: Quartiles | None = None
        self.said = False

    def recall(self, entries: Iterable[Entry]) -> None:
        """Takes the losses of earlier steps; what is found there was said then."""
        for entry in entries:
            if (loss := finite(entry.get("loss"))) is not None:
                self.note(entry["step"], loss)

    def note(self, step: int, loss: float) -> str | None:
        """The warning, once, at the step at which the loss has risen."""
        self.window.append(loss)
        self.count += 1
        self.first = self.first or Quartiles(step, loss, loss, RISE * loss)
        if len(self.window) < LEAST:
            return None
        ordered, size = sorted(self.window), len(self.window)
        now = Quartiles(step, ordered[size // 4], ordered[(size - 1) // 2], ordered[size - 1 - size // 4])
        first = self.first if self.count <= 2 * WINDOW else None
        before = self.best
        if size == WINDOW and (before is None or now.middle < before.middle):
            self.best = now
        for then, factor in ((before, RISE), (first, RISE_FROM_FIRST)):
            if then is not None and not self.said and _risen(then, now, factor):
                self.said = True
                return (
                    f"warning: the loss has risen from {then.middle:.3g} at step {then.step} to {now.middle:.3g} at "
                    f"step {step} (median of {size} steps): most likely the run diverges; lower learning_rate, or "
                    "clip (max_grad_norm=1; zo: zo.clip)"
                )
        return None


def _risen(then: Quartiles, now: Quartiles, factor: float) -> bool:
    return now.middle > max(factor * then.middle, then.middle + RISE_AT_LEAST) and now.low > then.high
