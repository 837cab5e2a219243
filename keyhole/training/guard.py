"""Numbers that are not finite stop a run; they are never trained on and never saved.

A loss of NaN or infinity means that this batch, or the weights before it, are broken. Methods do not apply an update
computed from such a loss (they check the gradient's norm, or zero the update on the device), so the weights are still
those of the previous step. The run stops, and the message names the step, the samples, and the last good checkpoint.

In float16 a gradient may occasionally overflow although the loss is finite. Its update is skipped with a warning; a run
that skips MOST_SKIPS steps in a row stops too.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from keyhole.errors import NonFinite

MOST_SKIPS = 10


def stop(step: int, what: str, batch: str, last_good: Path | None) -> NonFinite:
    """The error that ends a run at `step`; `what` names the bad number, such as `the loss is nan`."""
    good = f"the last good checkpoint is {last_good}" if last_good else "no checkpoint was written before it"
    return NonFinite(
        f"step {step}: {what}; its update was not applied and nothing was overwritten\n"
        f"  batch: {batch}\n"
        f"  {good}\n"
        "  likely: a learning rate that is too high (try a third of it), float16 (try dtype=bfloat16), or "
        "this batch"
    )


def bad_numbers(values: Mapping[str, float]) -> list[str]:
    """`name is value` for every value that is not finite."""
    return [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
