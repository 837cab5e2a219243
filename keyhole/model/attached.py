"""What a model knows of the method that trains it, and of the plan that placed it. When a method is made, it attaches:

    name       the plan may have been made for another method
    deferred   applies updates that the weights at home still lack
    addon      weights beside the model's own (adapters), which count when the model is saved or checked for changes

The model applies what is deferred before anybody reads the weights or another method trains them, also when the method
that deferred it is gone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from keyhole.model.structure.layout import FlatTensor


class Addon(Protocol):
    """Trained weights beside the model's own."""

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """These weights, by name."""

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor) -> torch.Tensor:
        """A weight of the model as it is saved: `home`, or a copy with the addon's part added."""

    def write_files(self, path: Path) -> None:
        """Adds the files of the addon to a model directory."""


class Attached(Protocol):
    """A method, as the model sees it."""

    name: str
    keeps_base: bool
    """Whether the weights of blocks never change."""

    @property
    def deferred(self) -> Callable[[], None] | None:
        """Applies the updates that the weights at home lack; None where updates are never deferred. The model keeps it,
        so it must not hold the method or the model."""

    @property
    def addon(self) -> Addon | None:
        """None where the method trains the model's own weights only."""


class DeviceBytes(Protocol):
    """The parts of a planned device peak."""

    @property
    def total(self) -> int: ...


class Placed(Protocol):
    """The plan by which a model was placed (plan/placement.py)."""

    reasons: list[str]
    device_bytes: DeviceBytes
    budget_bytes: int | None

    def warn_if_planned_for_another(self, method_name: str) -> None:
        """Warns when the budget was planned for another method than the one that is being attached."""
