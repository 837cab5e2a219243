"""Curves of a run with a fixed number of points, however long the run is, for the page that is drawn during training.

A point represents w consecutive steps and keeps the count and the sum of every number. There are at most
2 MOST points; when they are full, neighbours are merged and w doubles:

    w = 1 up to 2 MOST steps, then 2, 4, ...       time per step: O(1);  memory and time of a page: O(MOST)

Means of points are means of steps, since sums are kept. Time is the sum over training steps, without evaluations and
saves; a resumed run continues it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from keyhole.disk.json_text import finite
from keyhole.report.entries import Entry, entries, is_test

MOST = 300
LONGEST_NAME = 80
MOST_SECONDS, MOST_TOKENS = 1e9, 10**15  # largest plausible values of a step
NO_CURVE = {"step", "epoch", "tokens", "seconds"}


@dataclass
class Point:
    """Several consecutive steps. step, seconds: those of the last one."""

    steps: int
    step: int
    seconds: float
    sums: dict[str, tuple[int, float]]  # name -> count, sum

    def joined(self, other: "Point") -> "Point":
        sums = dict(self.sums)
        for name, (count, total) in other.sums.items():
            mine = sums.get(name, (0, 0.0))
            sums[name] = (mine[0] + count, mine[1] + total)
        return Point(self.steps + other.steps, other.step, other.seconds, sums)


@dataclass
class Curves:
    points: list[Point] = field(default_factory=list)
    width: int = 1  # steps per point
    evaluations: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)  # step, seconds, numbers
    tests: dict[int, dict[str, float]] = field(default_factory=dict)  # by step
    steps: int = 0
    last_step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)  # first and last step
    highest: dict[str, float] = field(default_factory=dict)
    recent: list[tuple[float, float]] = field(default_factory=list)  # tokens and seconds of the last steps

    def add(self, entry: Entry) -> None:
        """Adds an entry of metrics.jsonl. Values that are not finite numbers are left out."""
        step, found = entry["step"], {name: finite(value) for name, value in entry.items() if len(name) <= LONGEST_NAME}
        numbers = {name: value for name, value in found.items() if value is not None}
        if is_test(entry):
            self.tests[step] = {name: value for name, value in numbers.items() if name.startswith("test_")}
            return
        if "loss" not in entry:
            del numbers["step"]
            self.evaluations.append((step, self.seconds, numbers))
            if len(self.evaluations) > 2 * MOST:  # drop every other one of the older half
                half = len(self.evaluations) // 2
                self.evaluations = self.evaluations[:half:2] + self.evaluations[half:]
            return
        self.steps, self.last_step = self.steps + 1, step
        tokens = min(max(0, int(numbers.get("tokens", 0))), MOST_TOKENS)
        seconds = min(max(0.0, numbers.get("seconds", 0.0)), MOST_SECONDS)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.recent = [*self.recent[-19:], (float(tokens), seconds)]
        if "loss" in numbers:
            self.losses = [*self.losses[:1], (step, numbers["loss"])]
        for name, value in numbers.items():
            self.highest[name] = max(value, self.highest.get(name, value))
        sums = {name: (1, value) for name, value in numbers.items() if name not in NO_CURVE}
        point = Point(1, step, self.seconds, sums)
        if self.points and self.points[-1].steps < self.width:
            self.points[-1] = self.points[-1].joined(point)
        else:
            self.points.append(point)
        if len(self.points) > 2 * MOST:
            pairs = [self.points[i : i + 2] for i in range(0, len(self.points), 2)]
            self.points = [pair[0].joined(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
            self.width *= 2

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for point in self.points for name in point.sums))

    @property
    def evaluated(self) -> list[str]:
        return list(dict.fromkeys(name for _, _, numbers in self.evaluations for name in numbers))

    def mean(self, name: str, over_time: bool) -> tuple[list[float], list[float]]:
        """x and the mean of a number at each point that has it."""
        own = [point for point in self.points if name in point.sums]
        x = [point.seconds if over_time else float(point.step) for point in own]
        return x, [point.sums[name][1] / point.sums[name][0] for point in own]

    def evaluation(self, name: str, over_time: bool) -> tuple[list[float], list[float]]:
        """x and the values of a number of the evaluations."""
        own = [row for row in self.evaluations if name in row[2]]
        return [seconds if over_time else float(step) for step, seconds, _ in own], [row[2][name] for row in own]

    @property
    def late(self) -> tuple[float, float] | None:
        """Tokens and seconds of a step, the means of the last steps, without the first step of the run."""
        rows = self.recent[1:] if self.steps == len(self.recent) > 1 else self.recent
        return (fmean(tokens for tokens, _ in rows), fmean(seconds for _, seconds in rows)) if rows else None

    @property
    def pace(self) -> float | None:
        return self.late[0] / self.late[1] if self.late is not None and self.late[1] > 0 else None

    @property
    def step_seconds(self) -> float | None:
        return None if self.late is None else self.late[1]

    def result(self, kind: str) -> tuple[int, dict[str, float]]:
        """Step and numbers of the last test ("test"), or of the evaluation ("eval") at that step, whose weights are the
        run's result; without a test, of the last evaluation."""
        tested = max(self.tests, default=0)
        if kind == "test":
            return tested, self.tests.get(tested, {})
        rows = [row for row in self.evaluations if row[0] == tested] or self.evaluations
        return (rows[-1][0], rows[-1][2]) if rows else (0, {})


def read_curves(path: Path) -> tuple[Curves, int]:
    """The curves of a metrics file, and the number of lines that are left out."""
    curves, unreadable = Curves(), 0
    for entry in entries(path):
        if entry is None:
            unreadable += 1
        else:
            curves.add(entry)
    return curves, unreadable
