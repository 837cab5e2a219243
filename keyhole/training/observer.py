"""What reacts to the steps of a run: metrics, journal, page and trackers, checks, evaluations, saves.

The loop calls every observer of its list, in order, and knows no other way to reach them:

    note         the numbers of a step have been read (on a GPU one step late, metrics.py), or those of an evaluation
    after_step   a step has been queued; its numbers may be unread, and its update may be deferred (`Progress.paused`)
    close        the run is over, also after an error
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from keyhole.report.entries import Entry


@dataclass(frozen=True)
class Reading:
    """Numbers of a step or of an evaluation, as metrics.jsonl has them. update: the vector that a journal records, of a
    finite step; position: in the data, after the step."""

    entry: Entry
    update: list[float] | None = None
    position: tuple[int, int] = (0, 0)

    @property
    def step(self) -> int:
        return int(self.entry["step"])


class Progress(Protocol):
    """The run as observers see it. done: number of its steps so far; ends: why it ends after this one."""

    total: int
    done: int
    ends: str | None

    @property
    def is_last(self) -> bool:
        """Whether no step follows."""

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal has asked the run to stop after this step."""

    def note(self, reading: Reading) -> None:
        """Tells all observers."""

    def flush(self) -> None:
        """Applies deferred updates, on all ranks."""

    def paused(self) -> AbstractContextManager[None]:
        """Inside, all numbers are read and deferred updates are applied; its time counts towards no step."""


class Observer:
    """Does nothing; each kind overrides what it reacts to."""

    def note(self, reading: Reading) -> None: ...

    def after_step(self, run: Progress) -> None: ...

    def close(self) -> None: ...
