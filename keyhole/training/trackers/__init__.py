"""Copies of the metrics elsewhere: `report_to: [tensorboard, wandb, mlflow, trackio]`, each through its own library.

run/metrics.jsonl is always written; a tracker is opt-in and may fail without harm. A library is imported only when it
is asked for; one that is not installed is named, with the command that installs it, before anything else happens.

    tensorboard   run/tensorboard
    wandb         the server that one is logged in to; else offline, in run/wandb (`wandb sync` sends it)
    mlflow        MLFLOW_TRACKING_URI, else run/mlflow.db (`mlflow ui --backend-store-uri sqlite:///...`)
    trackio       TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, else its own directory (`trackio show`)

Names are those of metrics.jsonl. A run that goes on with --resume is the same run there (its id is in
run/keyhole.json); steps that are done again are written again. A tracker is a class with `write` and `close`, made from
an About; behind.py keeps it off the thread that trains.
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
PROJECT = "keyhole"  # where the library has no setting of its own that says otherwise


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run. directory: its run/; first: steps that are done already; name: for people."""

    directory: Path
    run: str
    name: str
    first: int = 0
    config: dict[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Keeps entries of metrics.jsonl somewhere."""

    def write(self, entry: dict[str, Any]) -> None:
        """An entry, with its step."""

    def close(self) -> None:
        """The run is over."""


def names_of(report_to: str | Sequence[str] | None) -> list[str]:
    """The trackers that are asked for, each once."""
    asked = [report_to] if isinstance(report_to, str) else report_to or []
    return list(dict.fromkeys(asked))


def require(report_to: str | Sequence[str] | None) -> None:
    """Before anything is written: the trackers that are asked for must be installed."""
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
    """The step, and what is a number besides it."""
    numbers = {name: float(value) for name, value in entry.items() if isinstance(value, int | float)}
    return int(numbers.pop("step")), numbers
