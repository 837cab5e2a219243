"""run/report.json: the contents of a run's page besides the metrics; and all that a page needs, from a run's files.

    lines       the start block: decisions and their reasons
    planned     planned bytes on the device by part, host bytes, seconds of a step; measured: the measured ones
    samples     rows of the data: runs of [trained?, tokens]
    answers     the model's answers at evaluations
    events      the printed lines, except those of steps
    state       running, done, stopped or failed; outcome has details

Files may be untrusted: they are read up to a size, and one with a value of a wrong type is passed over. Missing
information is left out of the page: a run without run/report.json still gets one.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml

from keyhole import assets
from keyhole.data.report import Marked
from keyhole.disk.files import read_small, write_text
from keyhole.disk.json_text import decode, json_text
from keyhole.errors import UserError
from keyhole.limits import Limit, NotNegative
from keyhole.machine.text import printable
from keyhole.report.curves import Curves, read_curves

FORMAT = 1
MOST_STORY, MOST_SMALL, MOST_CONFIG = 2**25, 2**22, 2**18  # bytes
MOST, MOST_EVENTS, MOST_ANSWERS = 4000, 60, 6  # characters of a text and items of a list, lines, evaluations
METRICS, STORY, PAGE = "metrics.jsonl", "report.json", "report.html"
RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"
Number = Annotated[int, Limit(0, 2**53)]


@dataclass
class Answer:
    """One of the model's answers at an evaluation. right: None if it cannot be decided."""

    prompt: str
    said: str
    expected: str = ""
    right: bool | None = None


@dataclass
class Answers:
    """The answers of one evaluation; about: how they were made."""

    step: Number
    about: str
    rows: list[Answer] = field(default_factory=list)


@dataclass
class Planned:
    """What was planned: bytes on the device by part, host bytes, seconds of a step by what takes them."""

    device_bytes: NotNegative = 0.0
    parts: dict[str, NotNegative] = field(default_factory=dict)
    host_bytes: NotNegative = 0.0
    seconds: dict[str, NotNegative] = field(default_factory=dict)
    bound_by: str = ""
    source: str = ""


@dataclass
class Story:
    run: str = ""
    title: str = ""
    method: str = ""
    model: str = ""
    device: str = ""
    state: str = RUNNING
    outcome: str = ""
    began: str = ""
    updated: str = ""
    total: Number = 0
    lines: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    planned: Planned = field(default_factory=Planned)
    measured: dict[str, NotNegative] = field(default_factory=dict)
    samples: list[Marked] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)

    def happened(self, line: str) -> None:
        """Adds a printed line; only the last ones are kept."""
        self.events = [*self.events[1 - MOST_EVENTS :], line[:MOST]]

    def answered(self, answers: Answers) -> None:
        """Adds the answers of an evaluation; the first and the newest evaluations are kept."""
        kept = [each for each in self.answers if each.step < answers.step]
        self.answers = [*kept[:1], *kept[1:][2 - MOST_ANSWERS :], answers]

    def went_back(self, step: int) -> None:
        """The run was resumed from a step: removes everything after it."""
        self.answers = [each for each in self.answers if each.step <= step]


def write_story(path: Path, story: Story) -> None:
    write_text(path, json_text({"format": FORMAT, **asdict(story)}) + "\n")


def read_story(path: Path) -> Story | None:
    found, story = _object(path, MOST_STORY), None
    with suppress(ValueError):
        story = decode(found, Story) if found.get("format") == FORMAT else None
    return story


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
    """The run/ directories of these paths, without duplicates, in order: a path is that of a run (output_dir, or its
    run/), or holds several, one level below or in runs/."""
    found: dict[Path, None] = {}
    for path in paths:
        here = [place for place in (path / "run", path) if os.path.isfile(place / METRICS)][:1]
        if not here:  # os.path: Path.is_file raises if a directory may not be searched
            try:
                below = [each for each in sorted(path.iterdir()) if each.is_dir()] if path.is_dir() else []
            except OSError as error:
                raise UserError(f"{printable(path)} cannot be read: {error.strerror}") from error
            with suppress(OSError):
                below += sorted(each for each in (path / "runs").iterdir() if each.is_dir())
            here = [each / "run" for each in below if os.path.isfile(each / "run" / METRICS)]
        if not here:
            raise UserError(
                f"{printable(path)}: no run is here; name the output_dir of a run (it has run/{METRICS}), or a "
                "directory that holds several"
            )
        found |= dict.fromkeys(here)
    return list(found)


def read_view(directory: Path, name: str | None = None) -> View:
    try:
        curves, unreadable = read_curves(directory / METRICS)
    except OSError as error:
        raise UserError(f"{printable(directory / METRICS)} cannot be read: {error.strerror or error}") from error
    config, settings = "", None
    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        config = read_small(directory / "config.yaml", MOST_CONFIG).decode("utf-8", "replace")
        if not any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(config)):  # expands when it is shown
            settings = yaml.safe_load(config)
    settings = settings if isinstance(settings, dict) else {}
    story = read_story(directory / STORY)
    if story is None:
        method, model = (printable(settings.get(key, ""), 200) for key in ("method", "model"))
        story = Story(method=method, model=model, total=curves.last_step, state="")
    environment = _object(directory / "env.json", MOST_SMALL)
    name = name or directory.absolute().parent.name
    return View(name, directory, story, curves, environment, config, settings, unreadable)


def _object(path: Path, most_bytes: int) -> dict[str, Any]:
    """The object in a JSON file, without nulls, which stand for numbers that were not finite; {} if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        text = read_small(path, most_bytes)
        found = json.loads(text, object_hook=lambda each: {key: x for key, x in each.items() if x is not None})
        return found if isinstance(found, dict) else {}
    return {}
