"""All data for the page of a run, read from the files in its directory.

A directory is that of a run (output_dir, or its run/), or contains several runs, one level below. Missing information
is left out of the page: a run of an older version has no run/report.json, and still gets a page.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from keyhole import assets
from keyhole.disk.files import read_small
from keyhole.errors import UserError
from keyhole.machine.text import printable
from keyhole.report.curves import Curves
from keyhole.report.entries import Entry
from keyhole.report.story import DONE, Story, read_story

MOST_METRICS, MOST_LINE, MOST_SMALL = 2**31, 2**16, 2**22  # bytes
METRICS, STORY, PAGE = "metrics.jsonl", "report.json", "report.html"


@dataclass
class View:
    """One run. directory: its run/. unreadable: the lines of its metrics that are left out."""

    name: str
    directory: Path
    story: Story
    curves: Curves
    environment: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    unreadable: int = 0

    @property
    def by_candidates(self) -> bool:
        """Whether the loss of training is one over candidates; that of evaluations is always one per token."""
        return self.settings.get("loss") == "candidates"

    @property
    def title(self) -> str:
        """`zo on opt-13b`; of a model directory, only its name."""
        model = "demo" if self.story.model == str(assets.MODEL) else self.story.model
        is_path = os.path.isabs(model) or model.startswith(("./", "../", "~"))
        model = os.path.basename(os.path.normpath(model)) if is_path else model
        return f"{self.story.method} on {model}" if self.story.method else self.name


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run/ directories of these paths, without duplicates, in order."""
    found: dict[Path, None] = {}
    for path in paths:
        here = _runs_in(path)
        if not here:
            raise UserError(
                f"{printable(path)}: no run is here; name the output_dir of a run (it has run/{METRICS}), or a "
                "directory that holds several"
            )
        found |= dict.fromkeys(here)
    return list(found)


def _runs_in(path: Path) -> list[Path]:
    for place in (path / "run", path):
        if os.path.isfile(place / METRICS):  # Path.is_file raises if a directory may not be searched
            return [place]
    try:
        below = sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []
    except OSError as error:
        raise UserError(f"{printable(path)} cannot be read: {error.strerror}") from error
    below = [*below, *(each for each in _listed(path / "runs"))]
    return [each / "run" for each in below if os.path.isfile(each / "run" / METRICS)]


def _listed(path: Path) -> list[Path]:
    """The subdirectories of a path, sorted; none if it cannot be read."""
    try:
        return sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []
    except OSError:
        return []


def read_view(directory: Path, name: str | None = None) -> View:
    """A run from its run/ directory."""
    try:
        curves, unreadable = read_curves(directory / METRICS)
    except OSError as error:
        raise UserError(f"{printable(directory / METRICS)} cannot be read: {error.strerror or error}") from error
    config = _read(directory / "config.yaml")
    environment = _json(directory / "env.json")
    settings = _yaml(config)
    story = read_story(directory / STORY) or _without_story(settings, curves)
    name = name or directory.absolute().parent.name
    return View(name, directory, story, curves, environment, config, settings, unreadable)


def read_curves(path: Path) -> tuple[Curves, int]:
    """The curves of the entries, read line by line, and the number of lines that are left out: those that are invalid
    or too long. A last line without its end, as a run leaves it that is writing or was killed, is not counted."""
    curves, unreadable = Curves(), 0
    if path.stat().st_size > MOST_METRICS:
        raise OSError(f"it has {path.stat().st_size:,} bytes, more than any run writes")
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE):
            is_whole = line.endswith(b"\n") or len(line) < MOST_LINE
            while len(line) == MOST_LINE and not line.endswith(b"\n"):  # the rest of a line that is too long
                line = file.readline(MOST_LINE)
            entry = _entry(line) if is_whole else None
            if entry is not None:
                curves.add(entry)
            elif line.endswith(b"\n") and line.strip():
                unreadable += 1
    return curves, unreadable


def _entry(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(entry, dict) and type(entry.get("step")) is int and 0 <= entry["step"] < 2**53
    return entry if good else None


def _without_story(settings: dict[str, Any], curves: Curves) -> Story:
    method, model = (printable(settings.get(name, ""), 200) for name in ("method", "model"))
    asked = settings.get("max_steps")
    total = asked if isinstance(asked, int) and 0 < asked < 2**53 else curves.last_step
    state = DONE if curves.last_step >= total else ""
    return Story(method=method, model=model, title=f"{method} on {model}", total=total, state=state)


def _read(path: Path) -> str:
    try:
        return read_small(path, MOST_SMALL).decode("utf-8", "replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _yaml(text: str) -> dict[str, Any]:
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            return {}  # not written by keyhole, and expands when it is shown
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
