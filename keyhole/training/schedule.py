"""The learning rate as a pure function of (step, total): nothing to save, nothing to restore.

With s = 0, 1, ... the number of updates done before this one, W = ceil(warmup_ratio * total) steps of
warm-up:

    s < W        peak * s / W                                    (so the first update of a warm-up has rate 0)
    constant     peak
    linear       peak * (total - s) / (total - W)
    cosine       peak * (1 + cos(pi (s - W) / (total - W))) / 2

To the last bit these are the values of transformers' get_scheduler, which a test checks; its "constant" has
no warm-up, so ours is its "constant_with_warmup".
"""

import math


def warmup_steps(total: int, warmup_ratio: float) -> int:
    """Number of updates during which the rate rises."""
    return math.ceil(total * warmup_ratio)


def factor(kind: str, step: int, total: int, warmup_ratio: float = 0.0) -> float:
    """Share of the peak rate for the update after `step` updates."""
    warm = warmup_steps(total, warmup_ratio)
    if step < warm:
        return step / max(1, warm)
    if kind == "linear":
        return max(0.0, (total - step) / max(1, total - warm))
    if kind == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warm) / max(1, total - warm)))))
    assert kind == "constant", kind
    return 1.0


def learning_rate(kind: str, step: int, total: int, peak: float, warmup_ratio: float = 0.0) -> float:
    """The rate of the update after `step` updates, of `total` in all."""
    return peak * factor(kind, step, total, warmup_ratio)
