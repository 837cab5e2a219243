"""The learning rate as a pure function of (step, total): nothing to save, nothing to restore.

With s = 0, 1, ... the number of updates done before this one, W = ceil(warmup_ratio * total) steps of
warm-up:

    s < W        peak * s / W                                    (so the first update of a warm-up has rate 0)
    constant     peak
    linear       peak * (total - s) / (total - W)
    cosine       peak * c,  c = (1 + cos(pi (s - W) / (total - W))) / 2
    cosine_with_min_lr        peak * (c (1 - m) + m), with m = min_lr_ratio, where it ends

To the last bit these are the values of transformers' get_scheduler, which a test checks; its "constant" has
no warm-up, so ours is its "constant_with_warmup".
"""

import math
from dataclasses import dataclass

MIN_LR = "cosine_with_min_lr"


@dataclass(frozen=True)
class Schedule:
    """The rates of a run of `total` updates."""

    kind: str
    peak: float
    total: int
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.0

    @property
    def warmup_steps(self) -> int:
        """Number of updates during which the rate rises."""
        return math.ceil(self.total * self.warmup_ratio)

    def factor(self, done: int) -> float:
        """Share of the peak rate for the update after `done` updates."""
        warm = self.warmup_steps
        if done < warm:
            return done / max(1, warm)
        if self.kind == "linear":
            return max(0.0, (self.total - done) / max(1, self.total - warm))
        if self.kind == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((done - warm) / max(1, self.total - warm)))))
        if self.kind == MIN_LR:
            cosine = 0.5 * (1.0 + math.cos(math.pi * ((done - warm) / max(1, self.total - warm))))
            return cosine * (1 - self.min_lr_ratio) + self.min_lr_ratio
        assert self.kind == "constant", self.kind
        return 1.0

    def rate(self, done: int) -> float:
        """The rate of the update after `done` updates."""
        return self.peak * self.factor(done)
