"""A run as numbers, from its run/metrics.jsonl; results/<id>.json marks it as finished.

    dev        the metric that selects, at the selected step: the best by dev, or the last
    test       the test metric of the weights of that step
    seconds    of the training steps, without evaluations and saves
    curve      (step, seconds so far, dev, loss on dev) of every evaluation
    losses     (step, seconds so far, mean training loss) in at most MOST_POINTS pieces

    warnings   of the run's log, those that say that the numbers are not what they seem: a head that stays as it was
               drawn, a loss that has risen, a gradient of 0

A failed run has `error` instead. Its kind decides what happens next time: `refused` (a mistake in settings or data,
NaN, out of memory) would fail again and is not repeated; `crash` is tried again.

The file ends with a checksum of the rest (`crc`), so that a damaged digit never becomes a number of the table. A result
of an earlier version has none, and counts.
"""

import json
import math
import typing
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from keyhole.compare.plan import Trial
from keyhole.config.fields import own_settings
from keyhole.data.run import Data
from keyhole.data.tasks.spec import LOWER_IS_BETTER
from keyhole.disk.files import read_small, write_text
from keyhole.disk.json_text import json_text
from keyhole.disk.typed_json import finite
from keyhole.methods import METHODS
from keyhole.methods.traits import AUTO_RATE
from keyhole.report.entries import Entry, is_test, read_metrics
from keyhole.training.selection import Selection, value_of
from keyhole.training.validation import Judge, common_metric

MOST_POINTS = 200
MOST_BYTES = 2**24
MOST_LOG_BYTES = 2**26
CHECKSUM = "crc"
WARNINGS = ("warning: head: ", "warning: the loss has risen")
REFUSED, CRASH = "refused", "crash"


@dataclass
class Result:
    """The result of a run."""

    id: str
    model: str
    task: str
    method: str
    point: list[list[str]]
    seed: int
    dev_metric: str = "loss"
    test_metric: str | None = None
    dev: float | None = None
    test: float | None = None
    best_step: int | None = None
    steps: int = 0
    seconds: float = 0.0
    forwards: float | None = None
    search_forwards: float = 0.0
    period_forwards: float = 0.0
    period_steps: int = 1
    tokens: int = 0
    gpu_gib: float | None = None
    curve: list[list[float | None]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    tests: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    kind: str | None = None

    def forwards_at(self, step: float) -> float:
        """Forward passes up to the end of a step, for a method that counts them, in units of a step's rows. A rate
        search comes first, and its steps cost more or less than others; what comes before each period
        is added when it begins."""
        periods = math.ceil(step / max(1, self.period_steps))
        return (self.forwards or 0.0) * step + self.search_forwards + self.period_forwards * periods

    @property
    def grid(self) -> tuple[tuple[str, str], ...]:
        """The values of the grid, in the form of a plan."""
        return tuple((key, value) for key, value in self.point)


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of the metric is better."""
    return metric.endswith(("loss", *LOWER_IS_BETTER))


def blank(trial: Trial) -> Result:
    """A result without numbers."""
    names = (trial.id, trial.model, trial.task, trial.method)
    return Result(*names, [list(pair) for pair in trial.point], trial.seed)


def summarise(trial: Trial, data: Data) -> Result:
    """The numbers of a run that has ended."""
    judge, config = Judge(data.dev, data.test), trial.config
    metric = config.metric_for_best_model or judge.metric or "loss"
    entries = read_metrics(Path(config.output_dir) / "run" / "metrics.jsonl")
    steps = [entry for entry in entries if "loss" in entry]
    evaluations = [entry for entry in entries if "eval_loss" in entry]
    seconds = _seconds_at(steps)
    made = blank(trial)
    made.dev_metric, made.test_metric = metric.removeprefix("eval_"), common_metric(data.test)
    made.steps, made.seconds = len(steps), max(seconds.values(), default=0.0)
    row, own = METHODS[config.method], own_settings(config)
    if own.forwards is not None:
        rows = config.batch_size * config.gradient_accumulation_steps
        made.forwards = float(own.forwards)
        made.period_forwards, made.period_steps = own.forwards_ahead(rows, len(data.train.dataset))
        if config.learning_rate == AUTO_RATE:
            made.search_forwards = row.search_steps * (row.search_passes - made.forwards)
    made.warnings = _warnings(Path(config.output_dir) / "run" / "log.txt")
    made.tokens = sum(entry["tokens"] for entry in steps)
    made.gpu_gib = max((entry["gpu_gib"] for entry in steps if "gpu_gib" in entry), default=None)
    made.curve = [
        [e["step"], seconds.get(e["step"], 0.0), finite(value_of(e, metric)), e["eval_loss"]] for e in evaluations
    ]
    made.losses = _pieces(steps, seconds)
    made.best_step = _chosen_step(trial, evaluations, metric, steps[-1]["step"] if steps else None)
    at = [entry for entry in evaluations if entry["step"] == made.best_step]
    made.dev = finite(value_of(at[0], metric)) if at else None
    for entry in (entry for entry in entries if is_test(entry) and entry["step"] == made.best_step):
        made.tests = finite_tests(entry)
        made.test = made.tests.get(f"test_{made.test_metric}")
    return made


def _warnings(log: Path) -> list[str]:
    try:
        lines = read_small(log, MOST_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.strip() for line in lines if line.strip().startswith(WARNINGS)))


def finite_tests(found: Entry) -> dict[str, float]:
    """The test metrics of an entry, without those that are not finite (null in a metrics file), or so large that their
    mean would not be (perplexities of a diverged run)."""
    tests = {name: value for name, value in found.items() if name.startswith("test_")}
    return {name: value for name, value in tests.items() if finite(value) is not None}


def _seconds_at(steps: list[Entry]) -> dict[int, float]:
    """Training seconds so far, by step."""
    found, total = {}, 0.0
    for entry in steps:
        total += entry["seconds"] or 0.0
        found[entry["step"]] = total
    return found


def _pieces(steps: list[Entry], seconds: dict[int, float]) -> list[list[float]]:
    size = max(1, -(-len(steps) // MOST_POINTS))
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    means = [[entry["loss"] for entry in group if entry["loss"] is not None] for group in groups]
    return [
        [group[-1]["step"], seconds[group[-1]["step"]], sum(losses) / len(losses)]
        for group, losses in zip(groups, means, strict=True)
        if losses
    ]


def _chosen_step(trial: Trial, evaluations: list[Entry], metric: str, last: int | None) -> int | None:
    if not evaluations:
        return last
    if not trial.config.load_best_model_at_end:
        return int(evaluations[-1]["step"])
    selection = Selection(trial.config, metric)
    for entry in evaluations:
        if value_of(entry, metric) is not None:
            selection.note(entry["step"], entry)
    return next(iter(selection.best_steps()), evaluations[-1]["step"])


def path_of(root: Path, run: str) -> Path:
    """The file with the result of a run."""
    return root / "results" / f"{run}.json"


def write_result(root: Path, result: Result) -> None:
    """Marks a run as finished."""
    path = path_of(root, result.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = asdict(result)
    write_text(path, json_text(content | {CHECKSUM: _crc(content)}, indent=1) + "\n")


def _crc(content: dict[str, Any]) -> int:
    return zlib.crc32(json_text(content).encode())


def read_result(root: Path, run: str) -> Result | None:
    """The result of a finished run; None if there is none, or if it has invalid values or another checksum."""
    try:
        text = read_small(path_of(root, run), MOST_BYTES)
        content: dict[str, Any] = json.loads(text, parse_constant=lambda name: None)  # NaN of earlier versions
        if CHECKSUM in content and content.pop(CHECKSUM) != _crc(content):
            return None
        kinds = typing.get_type_hints(Result)
        made = Result(**{key: value for key, value in content.items() if key in kinds})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    whole = all(_fits(getattr(made, key), kind) for key, kind in kinds.items()) and made.id == run
    widths = ((made.point, 2), (made.curve, 4), (made.losses, 3))
    whole = whole and all(len(row) == width for rows, width in widths for row in rows)
    return made if whole and all(x is not None for row in made.curve for x in row[:2]) else None


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value has the type of a field of Result."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if inner:
        return any(_fits(value, arm) for arm in inner)
    if kind is float:
        return finite(value) is not None
    return isinstance(value, kind) and not isinstance(value, bool)
