"""run/report.html and run/report.json, kept up to date beside training (keyhole/report/ draws the page).

The thread that trains only counts: an entry is added to curves of a fixed size, some microseconds per step. A second
thread makes the page from a copy and writes it, by one rename, when the last one is EVERY_S seconds old and a hundred
times as old as it took to make: at most 1 % of the time goes there, however slow the disk is. The first page is written
before the first step and the last one when the run is over, whatever ended it.

A page that cannot be written is no reason to stop: the caller hears of it once (reports.py), and it is tried again.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from keyhole.disk.files import write_text
from keyhole.machine.host import read_text
from keyhole.report.curves import Curves
from keyhole.report.entries import Entry
from keyhole.report.page import make_page, now
from keyhole.report.story import FAILED, RUNNING, Answers, Story, read_story, write_story
from keyhole.report.view import PAGE, STORY, View

EVERY_S, COST = 10.0, 100.0


class RunPage:
    """The page of one run. directory: its run/; view: what is known of it before the first step."""

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self.view, self.clock = view, clock
        self.lock = threading.Lock()
        self.wake = threading.Event()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.closed = False
        self.due_s = clock() + EVERY_S

    @property
    def story(self) -> Story:
        return self.view.story

    @property
    def path(self) -> Path:
        return self.view.directory / PAGE

    def add(self, entry: Entry) -> None:
        """An entry of metrics.jsonl. OSError, or whatever it was, when the last page could not be written."""
        with self.lock:
            self.view.curves.add(entry)
            error, self.error = self.error, None
        self._ask()
        if error is not None:
            raise error

    def change(self, change: Callable[[Story], object]) -> None:
        """Changes the story."""
        with self.lock:
            change(self.story)

    def happened(self, line: str) -> None:
        """A line that was printed. Those of steps are curves."""
        if not line.startswith("step "):
            self.change(lambda story: story.happened(line))

    def planned(self, numbers: dict[str, Any]) -> None:
        """What a step should take, by what is known of the steps now."""
        self.change(lambda story: setattr(story, "planned", numbers))

    def answered(self, answers: Answers) -> None:
        """Answers of an evaluation."""
        if answers.rows:
            self.change(lambda story: story.answered(answers))

    def ended(self, state: str, outcome: str = "") -> None:
        """How the run ended; the first word counts."""
        if self.story.state == RUNNING:
            self.change(lambda story: (setattr(story, "state", state), setattr(story, "outcome", outcome)))

    def _ask(self) -> None:
        """Has a page written, if it is time and none is being written."""
        if self.clock() < self.due_s or self.wake.is_set() or self.closed:
            return
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name="keyhole-page", daemon=True)
            self.thread.start()
        self.wake.set()

    def _work(self) -> None:
        self.wake.wait()
        while not self.closed:
            try:
                self.write()
            except Exception as error:  # of any kind: the caller says it, and the run goes on
                self.error = error
            self.wake.clear()
            if not self.closed:  # set before `wake` is: nobody waits for a thread that waits
                self.wake.wait()

    def write(self) -> None:
        """Makes the page and writes both files, now."""
        began_s = self.clock()
        try:
            with self.lock:
                self.story.updated = now()
                self._measure()
                view = copy.copy(self.view)
                view.story, view.curves = copy.copy(view.story), _copied(view.curves)
                view.story.measured = dict(view.story.measured)
            write_story(view.directory / STORY, view.story)
            write_text(view.directory / PAGE, make_page(view))
        finally:
            took_s = self.clock() - began_s
            self.due_s = began_s + took_s + max(EVERY_S, COST * took_s)

    def _measure(self) -> None:
        measured, highest = self.story.measured, self.view.curves.highest
        if "gpu_gib" in highest:
            measured["device_bytes"] = highest["gpu_gib"] * 2**30
        measured["host_bytes"] = max(measured.get("host_bytes", 0.0), _resident_bytes())

    def close(self) -> None:
        """The last page. A run that ended without a word has failed."""
        self.closed = True
        self.wake.set()
        if self.thread is not None:
            self.thread.join()
        self.ended(FAILED, "It ended before its last step.")
        self.write()


def _copied(curves: Curves) -> Curves:
    """As far as the curves change in place: lists are replaced, or appended to."""
    made = copy.copy(curves)
    made.points, made.evaluations = list(curves.points), list(curves.evaluations)
    made.tests, made.highest = dict(curves.tests), dict(curves.highest)
    return made


def _resident_bytes() -> float:
    """Of this process, now; 0 where there is no /proc."""
    lines = read_text(Path("/proc/self/status")).splitlines()
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0.0)


def begin_story(path: Path, run: str | None, first: int, fresh: Story) -> Story:
    """The story of a run that begins; of one that goes on, with what the file has of the steps before."""
    before = read_story(path) if first else None
    if before is None or before.run != (run or ""):
        return fresh
    before.went_back(first)
    fresh.answers, fresh.began, fresh.events = before.answers, before.began or fresh.began, before.events
    fresh.spans, fresh.traced_step, fresh.traced_s = before.spans, before.traced_step, before.traced_s
    return fresh


def begin_curves(kept: Iterable[Entry]) -> Curves:
    """The curves of the steps that metrics.jsonl has from before."""
    curves = Curves()
    for entry in kept:
        curves.add(entry)
    return curves
