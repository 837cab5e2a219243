"""Trackers: copies of the metrics in `report_to: [tensorboard, wandb, mlflow, trackio]`, each through its own library.

run/metrics.jsonl is always written; a tracker is opt-in, and its failure does not end the run. A library is imported
only if its tracker is configured; if it is not installed, the error names the command that installs it, before anything
else happens.

    tensorboard   run/tensorboard
    wandb         the server that you are logged in to; else offline, in run/wandb (`wandb sync` sends it)
    mlflow        MLFLOW_TRACKING_URI, else run/mlflow.db (`mlflow ui --backend-store-uri sqlite:///...`)
    trackio       TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, else its own directory (`trackio show`)

Names are those of metrics.jsonl. A resumed run continues the same run in the tracker (its id is in run/keyhole.json);
repeated steps are written again. A tracker is a class with `write` and `close`, made from an About; behind.py runs it
in a separate thread.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from keyhole.errors import UserError

CLASSES: dict[str, str] = {
    "tensorboard": "keyhole.training.trackers.tensorboard:TensorBoard",
    "wandb": "keyhole.training.trackers.wandb:WandB",
    "mlflow": "keyhole.training.trackers.mlflow:MLflow",
    "trackio": "keyhole.training.trackers.trackio:Trackio",
}
PROJECT = "keyhole"  # default, if the library's own setting does not say otherwise


@dataclass(frozen=True)
class About:
    """A run, as described to a tracker. directory: its run/; first: steps that are done already; name: the shown
    name."""

    directory: Path
    run: str
    name: str
    first: int = 0
    config: dict[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives entries of metrics.jsonl."""

    def write(self, entry: dict[str, Any]) -> None:
        """Writes an entry, with its step."""

    def close(self) -> None:
        """Ends the run in the tracker."""


def names_of(report_to: str | Sequence[str] | None) -> list[str]:
    """The configured trackers, without duplicates."""
    asked = [report_to] if isinstance(report_to, str) else report_to or []
    return list(dict.fromkeys(asked))


def require(report_to: str | Sequence[str] | None) -> None:
    """Before anything is written: checks that the configured trackers are installed."""
    for name in names_of(report_to):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"report_to: {name} is not installed; pip install {name} (all: pip install 'keyhole[trackers]'), or "
                "leave it out"
            )


def open_tracker(name: str, about: About) -> Tracker:
    """The tracker of this name; imports its library."""
    module, _, cls = CLASSES[name].partition(":")
    made: Tracker = getattr(importlib.import_module(module), cls)(about)
    return made


def step_and_numbers(entry: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """The step, and the other numbers of an entry."""
    numbers = {name: float(value) for name, value in entry.items() if isinstance(value, int | float)}
    return int(numbers.pop("step")), numbers
