"""Progress of a comparison: on a terminal a bar with the current run, elsewhere plain lines.

The runs themselves print nothing: their lines are in run/log.txt.
"""

import sys
import time
from collections.abc import Callable

from keyhole.machine.text import duration, printable
from keyhole.report.entries import Entry
from keyhole.training.display import Display


class Quiet(Display):
    """The display of a run inside a comparison: lines go only to run/log.txt, steps to `watch`."""

    def __init__(self, total: int, every: int, watch: Callable[[int, int], None]) -> None:
        super().__init__(total, every)
        self.watch = watch

    def open(self, first_step: int, gone: Callable[[], None] | None = None) -> None:
        self.began_s, self.first_step = time.monotonic(), first_step

    def _print(self, text: str) -> None:
        """Prints nothing: the comparison uses the terminal."""

    def step(self, entry: Entry) -> None:
        super().step(entry)
        self.watch(entry["step"], self.total)


class Progress:
    """Counts finished runs, and shows a bar with the steps of the current run on a terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console  # only programs have it
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self.total, self.finished, self.before, self.label = total, 0, 0, ""
        self.began_s: float | None = None
        columns = (BarColumn(), TextColumn("{task.description}"))
        self.bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self.task = self.bar.add_task("", total=None)

    def begin(self, label: str) -> None:
        """A run begins."""
        if self.began_s is None:
            self.began_s, self.before = time.monotonic(), self.finished
        self.label = f"{self.finished + 1}/{self.total} {printable(label, 100)}"
        self.bar.update(self.task, description=self.label, total=None)

    def step(self, step: int, total: int) -> None:
        """A step of the run is done."""
        text = f"{self.label}, step {step}/{total}"
        self.bar.update(self.task, description=text, total=total, completed=step)

    def count(self) -> str:
        """`12/84, 1 h 3 min left`, for the line of a run that has just ended."""
        done, began_s = self.finished + 1, self.began_s or time.monotonic()
        left_s = (time.monotonic() - began_s) / max(1, done - self.before) * (self.total - done)
        return f"{done}/{self.total}" + (f", {duration(left_s)} left" if done < self.total else "")
