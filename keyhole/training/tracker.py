"""A copy of the metrics in another format: TensorBoard when `report_to: tensorboard`, none otherwise.

run/metrics.jsonl is always written; a tracker is opt-in and may fail without harm.
"""

import importlib.util
from pathlib import Path
from typing import Any

from keyhole.errors import UserError

QUEUE = 10**6  # entries; with its default of 10 a slow disk would hold up training


class NullTracker:
    """A tracker that keeps nothing: `report_to: null`."""

    def write(self, entry: dict[str, Any]) -> None:
        """An entry of metrics.jsonl."""

    def close(self) -> None:
        """Nothing to close."""


class TensorBoard(NullTracker):
    """Scalars in run/tensorboard; a resumed run replaces the steps it does again."""

    def __init__(self, directory: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = str(directory / "tensorboard")
        self.writer = SummaryWriter(place, purge_step=last_step + 1, max_queue=QUEUE)

    def write(self, entry: dict[str, Any]) -> None:
        for name, value in entry.items():
            if name != "step":
                self.writer.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        self.writer.close()


def require(report_to: str | None) -> None:
    """Before anything is written: the tracker asked for must be installed."""
    if report_to is not None and importlib.util.find_spec("tensorboard") is None:
        raise UserError("report_to: tensorboard is missing; pip install 'keyhole[tensorboard]', or report_to=null")


def tracker(report_to: str | None, directory: Path, last_step: int) -> NullTracker:
    """The tracker that the config asks for."""
    return NullTracker() if report_to is None else TensorBoard(directory, last_step)
