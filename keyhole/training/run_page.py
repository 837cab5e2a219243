"""Keeps run/report.html and run/report.json up to date during training (keyhole/report/ draws the page).

The training thread only adds each entry to curves of a fixed size, which takes some microseconds per step. A second
thread makes the page from a copy and writes it, with one rename, when the last page is at least EVERY_S seconds old and
a hundred times as old as it took to make. So the page takes at most 1 % of the time, however slow the disk is. The
first page is written before the first step and the last one when the run ends, also after an error.

If a page cannot be written, the caller gets the error once (reports.py), and writing is tried again later.
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
    """The page of one run. directory: its run/; view: the contents known before the first step."""

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
        """Adds an entry of metrics.jsonl. Raises the error of the last page if it could not be written."""
        with self.lock:
            self.view.curves.add(entry)
            error, self.error = self.error, None
        self._ask()
        if error is not None:
            raise error

    def change(self, change: Callable[[Story], object]) -> None:
        """Changes the story (the page's contents besides curves)."""
        with self.lock:
            change(self.story)

    def happened(self, line: str) -> None:
        """Adds a printed line. Lines of steps are left out: the curves show them."""
        if not line.startswith("step "):
            self.change(lambda story: story.happened(line))

    def planned(self, numbers: dict[str, Any]) -> None:
        """Sets the planned numbers of a step, recomputed for the measured steps."""
        self.change(lambda story: setattr(story, "planned", numbers))

    def answered(self, answers: Answers) -> None:
        """Adds the answers of an evaluation."""
        if answers.rows:
            self.change(lambda story: story.answered(answers))

    def ended(self, state: str, outcome: str = "") -> None:
        """Sets how the run ended; the first call wins."""
        if self.story.state == RUNNING:
            self.change(lambda story: vars(story).update(state=state, outcome=outcome))

    def _ask(self) -> None:
        """Starts writing a page, if one is due and none is being written."""
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
            except Exception as error:  # of any kind: the caller reports it, and the run continues
                self.error = error
            self.wake.clear()
            if not self.closed:  # set before `wake`, so `close` never waits for a waiting thread
                self.wake.wait()

    def write(self) -> None:
        """Makes the page and writes both files now."""
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
        """Writes the last page. A run whose end was not announced has failed."""
        self.closed = True
        self.wake.set()
        if self.thread is not None:
            self.thread.join()
        self.ended(FAILED, "It ended before its last step.")
        self.write()


def _copied(curves: Curves) -> Curves:
    """A copy, as deep as the curves change in place: lists are replaced, or appended to."""
    made = copy.copy(curves)
    made.points, made.evaluations = list(curves.points), list(curves.evaluations)
    made.tests, made.highest = dict(curves.tests), dict(curves.highest)
    return made


def _resident_bytes() -> float:
    """Resident memory of this process; 0 without /proc."""
    lines = read_text(Path("/proc/self/status")).splitlines()
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0.0)


def begin_story(path: Path, run: str | None, first: int, fresh: Story) -> Story:
    """The story of a new run; for a resumed run, with the file's contents about earlier steps."""
    before = read_story(path) if first else None
    if before is None or before.run != (run or ""):
        return fresh
    before.went_back(first)
    fresh.answers, fresh.began, fresh.events = before.answers, before.began or fresh.began, before.events
    fresh.spans, fresh.traced_step, fresh.traced_s = before.spans, before.traced_step, before.traced_s
    return fresh


def begin_curves(kept: Iterable[Entry]) -> Curves:
    """The curves of earlier steps, from metrics.jsonl."""
    curves = Curves()
    for entry in kept:
        curves.add(entry)
    return curves
