"""The interface between a model, the method that trains it, and the plan that placed it. A new method attaches:

    name       is compared with the method that the plan was made for
    deferred   a function that applies updates that the weights at home still lack
    addon      trained weights beside the model's own (adapters), which are saved and checked with the model

The model applies deferred updates before its weights are read or another method trains them, also after the method that
deferred them was deleted.
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
    """Whether the weights of blocks are frozen."""

    @property
    def deferred(self) -> Callable[[], None] | None:
        """A function that applies the updates that the weights at home lack; None if updates are never deferred. The
        model keeps it, so it must not hold a reference to the method or the model."""

    @property
    def addon(self) -> Addon | None:
        """None if the method trains only the model's own weights."""


class DeviceBytes(Protocol):
    """The parts of a planned device peak."""

    @property
    def total(self) -> int: ...


class Placed(Protocol):
    """The plan by which a model was placed (plan/placement.py)."""

    reasons: list[str]
    device_bytes: DeviceBytes
    budget_bytes: int | None

    def check_method(self, method: str) -> None:
        """Refuses a method that cannot train this model, and warns if the plan was made for another one."""

    def warn_if_larger(self, tokens: int) -> None:
        """Warns once of a batch with more tokens than the plan was made for."""
