"""What a method takes from the configuration: the settings that all share, and its own section."""

from typing import Any

from keyhole.config.fields import section_of


def settings(config: Any, name: str) -> dict[str, Any]:
    """Arguments of the method's constructor, all but the model and the learning rate."""
    shared = {key: getattr(config, key) for key in ("weight_decay", "max_grad_norm", "seed")}
    return shared | vars(getattr(config, section_of(name)))
