"""Reports of a run: the page, trackers, and the lines on the terminal. A failing report does not end the run.

Each failure is reported once. The page is written again later; a tracker that has failed gets no more entries.
"""

from collections.abc import Callable
from functools import partial

from keyhole.training.display import Display
from keyhole.training.observer import Observer, Reading
from keyhole.training.page import RunPage
from keyhole.training.plot import plot_loss
from keyhole.training.rundir import RunDir
from keyhole.training.trackers import Tracker

AGAIN = "it is tried again"


class Reports(Observer):
    """Shows entries of steps and evaluations on the page, in the trackers and on the terminal."""

    def __init__(self, directory: RunDir, page: RunPage, trackers: list[Tracker], display: Display) -> None:
        self.directory, self.page, self.trackers, self.display = directory, page, trackers, display
        self.failing: set[str] = set()
        display.heard = page.happened

    def begin(self) -> None:
        """Writes the first page, before the first step."""
        self._try("run/report.html", self.page.write, AGAIN)
        if "run/report.html" not in self.failing:
            self.display.line(f"page: {self.page.path}")

    def note(self, reading: Reading) -> None:
        entry = reading.entry
        self._try("run/report.html", lambda: self.page.add(entry), AGAIN)
        for each in list(self.trackers):
            if not self._try(f"report_to: {each.name}", partial(each.write, entry), "it gets nothing more"):
                self.trackers.remove(each)
        if "loss" in entry:
            self._try("the line of a step", lambda: self.display.step(entry), "training goes on")

    def _try(self, name: str, act: Callable[[], object], then: str) -> bool:
        try:
            act()
            return True
        except Exception as error:
            if name not in self.failing:
                self.display.line(f"warning: {name} failed: {type(error).__name__}: {error}; {then}")
            self.failing.add(name)
            return False

    def tell(self, what: str, act: Callable[[], object]) -> None:
        """Does something for the page; if it fails, the run continues."""
        self._try(what, act, "the page goes without")

    def close(self) -> None:
        """Closes the trackers and the page, and draws the curve; prints what failed."""
        for each in self.trackers:
            self._try(f"report_to: {each.name}", each.close, "some entries are lost")
        self._try("writing run/report.html", self.page.close, "the numbers are in run/metrics.jsonl")
        self._try("drawing run/loss.png", self._draw, "the numbers are in run/metrics.jsonl")

    def _draw(self) -> None:
        view = self.page.view
        if plot_loss(self.directory.metrics, self.directory.curve, view.story.title, view.by_candidates):
            self.display.line(f"curve: {self.directory.curve}")
