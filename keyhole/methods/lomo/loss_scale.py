"""A dynamic loss scale for float16.

Gradients below 6e-8 underflow in float16. The loss is multiplied by a power of two before the backward pass, and the
gradients are divided by it afterwards, in fp32. If one of them overflowed, nothing is updated and the scale is halved;
after INTERVAL good steps in a row it is doubled, up to MOST.
"""

from collections.abc import Mapping
from typing import Any

FIRST, MOST, LEAST, INTERVAL = 2.0**16, 2.0**24, 1.0, 1000


class LossScale:
    """The scale, and the number of good steps in a row."""

    def __init__(self) -> None:
        self.scale, self.good = FIRST, 0

    def update(self, finite: bool) -> None:
        """Adjusts the scale after a step."""
        if not finite:
            self.scale, self.good = max(self.scale / 2, LEAST), 0
            return
        self.good += 1
        if self.good == INTERVAL:
            self.scale, self.good = min(self.scale * 2, MOST), 0

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.scale, "loss_scale_good": self.good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.good = float(state["loss_scale"]), int(state["loss_scale_good"])
