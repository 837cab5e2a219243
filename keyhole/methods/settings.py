"""What a method takes from the configuration: the settings that all share, and its own section."""

import math
from typing import Any

from keyhole.config.fields import section_of
from keyhole.errors import UserError


def checked_rate(lr: Any) -> float:
    """The learning rate, if it is one: for those who do not come by way of a config."""
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not math.isfinite(lr) or lr < 0:
        raise UserError(f"lr: {lr!r} is no learning rate; a number of at least 0 is needed")
    return float(lr)


def settings(config: Any, name: str) -> dict[str, Any]:
    """Arguments of the method's constructor, all but the model and the learning rate."""
    shared = {key: getattr(config, key) for key in ("weight_decay", "max_grad_norm", "seed")}
    return shared | vars(getattr(config, section_of(name)))
