"""The learning rate as a pure function of (step, total): nothing to save, nothing to restore.

With s = 0, 1, ... the number of updates done before this one, and W steps of warm-up (warmup_steps, where that is set;
below 1 it is a share, as in Hugging Face's Trainer, and so is warmup_ratio: W = ceil(share * total)):

    s < W        peak * s / W                                    (so the first update of a warm-up has rate 0)
    constant     peak
    linear       peak * (total - s) / (total - W)
    cosine       peak * c,  c = (1 + cos(pi (s - W) / (total - W))) / 2
    cosine_with_min_lr        peak * (c (1 - m) + m), with m = min_lr_ratio, where it ends

To the last bit these are the values of transformers' get_scheduler, which a test checks; its "constant" has
no warm-up, so ours is its "constant_with_warmup".
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Schedule:
    kind: str
    peak: float
    total: int
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.0
    warmup_asked: float = 0.0  # the setting warmup_steps

    @property
    def warmup_steps(self) -> int:
        """Number of updates during which the rate rises."""
        if self.warmup_asked >= 1:
            return int(self.warmup_asked)
        return math.ceil(self.total * (self.warmup_asked or self.warmup_ratio))

    def warmed_up_by(self, ratio: float) -> "Schedule":
        """This schedule with another warm-up, for rates that have a warm-up of their own."""
        return replace(self, warmup_ratio=ratio, warmup_asked=0.0)

    def factor(self, done: int) -> float:
        """Share of the peak rate for the update after `done` updates."""
        warm = self.warmup_steps
        if done < warm:
            return done / max(1, warm)
        if self.kind == "constant":
            return 1.0
        if self.kind == "linear":
            return max(0.0, (self.total - done) / max(1, self.total - warm))
        cosine = 0.5 * (1.0 + math.cos(math.pi * ((done - warm) / max(1, self.total - warm))))
        return max(0.0, cosine) if self.kind == "cosine" else cosine * (1 - self.min_lr_ratio) + self.min_lr_ratio

    def rate(self, done: int) -> float:
        return self.peak * self.factor(done)
