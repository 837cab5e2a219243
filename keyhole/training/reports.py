"""Reports of a run: its page, trackers, and the lines on the terminal. A failing report does not end the run.

Each failure is reported once. The page is written again later; a tracker that has failed gets no more entries.

The page, run/report.html and run/report.json, is drawn by keyhole/report/. An entry is added to its curves, which have
a fixed size, in some microseconds. It is made again after an entry if the last one is at least EVERY_S seconds old and
a hundred times as old as it took to make, so it takes at most 1 % of the time, however slow the disk is. The first page
is written before the first step and the last one when the run ends, also after an error.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from keyhole.config import to_yaml
from keyhole.data.preview import marked
from keyhole.disk.files import write_text
from keyhole.report.curves import Curves
from keyhole.report.entries import Entry
from keyhole.report.page import make_page, now
from keyhole.report.story import FAILED, PAGE, RUNNING, STORY, Story, View, read_story, write_story
from keyhole.training.display import Display
from keyhole.training.metrics import Reading, resident_bytes
from keyhole.training.planning import planned
from keyhole.training.run import Observer, Run
from keyhole.training.rundir import RunDir
from keyhole.training.start import flat_config
from keyhole.training.trackers import About, Tracker, open_trackers

AGAIN = "it is tried again"
EVERY_S, COST = 10.0, 100.0


class RunPage:
    """The page of one run. view: the contents known before the first step."""

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self.view, self.story, self.clock = view, view.story, clock
        self.path = view.directory / PAGE
        self.due_s = clock() + EVERY_S

    def add(self, entry: Entry) -> None:
        """Adds an entry of metrics.jsonl, and writes the page if that is due."""
        self.view.curves.add(entry)
        if self.clock() >= self.due_s:
            self.write()

    def happened(self, line: str) -> None:
        """Adds a printed line. Lines of steps are left out: the curves show them."""
        if not line.startswith("step "):
            self.story.happened(line)

    def ended(self, state: str, outcome: str = "") -> None:
        """Sets how the run ended; the first call wins."""
        if self.story.state == RUNNING:
            self.story.state, self.story.outcome = state, outcome

    def write(self) -> None:
        began_s = self.clock()
        try:
            self.story.updated = now()
            measured, highest = self.story.measured, self.view.curves.highest
            if "gpu_gib" in highest:
                measured["device_bytes"] = highest["gpu_gib"] * 2**30
            measured["host_bytes"] = max(measured.get("host_bytes", 0.0), resident_bytes())
            write_story(self.view.directory / STORY, self.story)
            write_text(self.path, make_page(self.view))
        finally:
            took_s = self.clock() - began_s
            self.due_s = began_s + took_s + max(EVERY_S, COST * took_s)

    def close(self) -> None:
        self.ended(FAILED, "It ended before its last step.")
        self.write()


class Reports(Observer):
    """Shows entries of steps and evaluations on the page, in the trackers and on the terminal."""

    def __init__(self, directory: RunDir, page: RunPage, trackers: list[Tracker], display: Display) -> None:
        self.directory, self.page, self.trackers, self.display = directory, page, trackers, display
        self.failing: set[str] = set()
        display.heard = page.happened

    def begin(self) -> None:
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
        self._try(what, act, "the page goes without")

    def close(self) -> None:
        for each in self.trackers:
            self._try(f"report_to: {each.name}", each.close, "some entries are lost")
        self._try("writing run/report.html", self.page.close, "the numbers are in run/metrics.jsonl")


def open_reports(
    run: Run, display: Display, run_id: str | None, lines: list[str], kept: list[Entry], machine: dict[str, Any]
) -> Reports:
    """The reports of a run, with the first page; of a resumed one, with what the files say about earlier steps. lines:
    the start block; kept: entries of earlier steps."""
    config, directory, model = run.config, run.directory, run.model
    name, curves = directory.root.absolute().name, Curves()
    story = Story(run_id or "", lines[0], config.method, config.model, model.device.type, lines=lines)
    story.began, story.total, story.planned = now(), run.total, planned(model, config.method)
    before = read_story(directory.run / STORY) if run.first else None
    if before is not None and before.run == story.run:
        before.went_back(run.first)
        story.answers, story.began, story.events = before.answers, before.began or story.began, before.events
    for entry in kept:
        curves.add(entry)
    view = View(name, directory.run, story, curves, machine, to_yaml(config), {"loss": config.loss})
    about = About(directory.run, run_id or name, name, run.first, flat_config(config))
    made = Reports(directory, RunPage(view), open_trackers(config.report_to, about), display)
    rows = partial(marked, run.data.train.dataset, model.tokenizer, labels=run.data.labels)
    made.tell("rows of the data", lambda: story.samples.extend(rows()))
    made.begin()
    return made
