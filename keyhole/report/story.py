"""run/report.json: the contents of a run's page besides the metrics. The page is made of it and of metrics.jsonl.

    lines       the start block: decisions and their reasons
    planned     planned bytes on the device by part, host bytes, seconds of a step; measured: the measured ones
    spans       the trace of one step: [lane, label, begin, duration], milliseconds
    samples     rows of the data: runs of [trained?, tokens]
    answers     the model's answers at evaluations
    events      the printed lines, except those of steps
    state       running, done, stopped or failed; outcome has details

The file may be untrusted: on reading, a value of the wrong type is left out, and texts and lists are cut at a limit.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from keyhole.disk.files import read_small, write_text
from keyhole.disk.json_text import json_text
from keyhole.report.entries import finite

FORMAT = 1
MOST_BYTES = 32 * 2**20
MOST_TEXT, MOST_LINES, MOST_EVENTS, MOST_SPANS, MOST_ANSWERS = 4000, 2000, 60, 4000, 6
RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"
Span = tuple[str, str, float, float]


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

    step: int
    about: str
    rows: list[Answer] = field(default_factory=list)


@dataclass
class Sample:
    """A row of the data. runs: runs of tokens, context or trained, as text, token by token."""

    where: str
    about: str
    runs: list[tuple[bool, list[str]]] = field(default_factory=list)


@dataclass
class Story:
    """The file."""

    run: str = ""
    title: str = ""
    method: str = ""
    model: str = ""
    device: str = ""
    state: str = RUNNING
    outcome: str = ""
    began: str = ""
    updated: str = ""
    total: int = 0
    lines: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    planned: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    traced_step: int = 0
    traced_s: float = 0.0  # seconds of that step
    spans: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)

    def happened(self, line: str) -> None:
        """Adds a printed line; only the last ones are kept."""
        self.events = [*self.events[1 - MOST_EVENTS :], line[:MOST_TEXT]]

    def answered(self, answers: Answers) -> None:
        """Adds the answers of an evaluation; the first and the newest evaluations are kept."""
        kept = [each for each in self.answers if each.step < answers.step]
        self.answers = [*kept[:1], *kept[1:][2 - MOST_ANSWERS :], answers]

    def went_back(self, step: int) -> None:
        """The run was resumed from a step: removes everything after it."""
        self.answers = [each for each in self.answers if each.step <= step]


def write_story(path: Path, story: Story) -> None:
    """Replaces the file."""
    write_text(path, json_text({"format": FORMAT, **asdict(story)}) + "\n")


def read_story(path: Path) -> Story | None:
    """The content of the file; None if it is missing or invalid."""
    try:
        found = json.loads(read_small(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    made = Story()
    for name in ("run", "title", "method", "model", "device", "state", "outcome", "began", "updated"):
        setattr(made, name, _text(found.get(name), getattr(made, name)))
    made.total, made.traced_step = _whole(found.get("total")), _whole(found.get("traced_step"))
    made.traced_s = max(0.0, finite(found.get("traced_s")) or 0.0)
    made.lines = [_text(line) for line in _list(found.get("lines"), MOST_LINES)]
    made.events = [_text(line) for line in _list(found.get("events"), MOST_EVENTS)]
    made.planned = _planned(_dict(found.get("planned")))
    made.measured = _numbers(_dict(found.get("measured")))
    made.spans = [span for row in _list(found.get("spans"), MOST_SPANS) if (span := _span(row)) is not None]
    made.samples = [_sample(_dict(row)) for row in _list(found.get("samples"), 10)]
    made.answers = [_answers(_dict(row)) for row in _list(found.get("answers"), MOST_ANSWERS)]
    return made


def _text(value: Any, otherwise: str = "") -> str:
    return value[:MOST_TEXT] if isinstance(value, str) else otherwise


def _whole(value: Any) -> int:
    number = finite(value)
    return min(int(number), 2**53) if number is not None and number >= 0 else 0


def _list(value: Any, most: int) -> list[Any]:
    return value[:most] if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: dict[str, Any]) -> dict[str, float]:
    return {_text(name): n for name, each in list(value.items())[:50] if (n := finite(each)) is not None and n >= 0}


def _planned(value: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = _numbers(value)
    parts = {name: _numbers(_dict(value.get(name))) for name in ("parts", "seconds")}
    texts = {name: _text(value.get(name)) for name in ("bound_by", "source")}
    return kept | {name: each for name, each in (parts | texts).items() if each}


def _span(row: Any) -> Span | None:
    if not isinstance(row, list) or len(row) != 4:
        return None
    begin, duration = finite(row[2]), finite(row[3])
    if begin is None or duration is None or duration < 0:
        return None
    return _text(row[0]), _text(row[1]), begin, duration


def _sample(row: dict[str, Any]) -> Sample:
    runs = [(bool(run[0]), run[1]) for run in _list(row.get("runs"), 200) if isinstance(run, list) and len(run) == 2]
    shown = [(trained, [_text(word) for word in _list(words, 1000)]) for trained, words in runs]
    return Sample(_text(row.get("where")), _text(row.get("about")), shown)


def _answers(row: dict[str, Any]) -> Answers:
    found = [_dict(each) for each in _list(row.get("rows"), 20)]
    rows = [
        Answer(
            _text(each.get("prompt")),
            _text(each.get("said")),
            _text(each.get("expected")),
            each["right"] if isinstance(each.get("right"), bool) else None,
        )
        for each in found
    ]
    return Answers(_whole(row.get("step")), _text(row.get("about")), rows)
