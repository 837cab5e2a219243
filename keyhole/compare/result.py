"""A run as numbers, from its run/metrics.jsonl; and the directory of a comparison, where results/<id>.json marks a run
as finished.

    dev        the metric that selects, at the selected step: the best by dev, or the last
    test       the test metric of the weights of that step
    seconds    of the training steps, without evaluations and saves
    curve      (step, seconds so far, dev, loss on dev) of every evaluation
    warnings   of the run's log, those that say that the numbers are not what they seem: a head that stays as it was
               drawn, a loss that has risen, a gradient of 0

A failed run has `error` instead. Its kind decides what happens next time: `refused` (a mistake in settings or data,
NaN, out of memory) would fail again and is not repeated; `crash` is tried again.

comparison.json marks the directory as written by `keyhole compare`: only such a directory, or a new or empty one, is
used. It also holds the day on which the comparison began, which chat templates that print the date get in every run, so
that runs of different days train on the same tokens.
"""

import datetime
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from keyhole.compare.plan import Point, Trial
from keyhole.data.run import Data
from keyhole.data.settings import today
from keyhole.data.tasks.spec import LOWER_IS_BETTER
from keyhole.disk.files import read_small, write_text, writing_to
from keyhole.disk.json_text import decode, finite, json_text
from keyhole.errors import UserError
from keyhole.report.entries import Entry, is_test, read_metrics
from keyhole.training import rundir
from keyhole.training.validation import Judge, Selection, common_metric, value_of

MOST_BYTES, MOST_LOG_BYTES, MOST_MARKER_BYTES = 2**24, 2**26, 2**20
MARKER, FORMAT = "comparison.json", 1
WARNINGS = ("warning: head: ", "warning: the loss has risen")
REFUSED, CRASH = "refused", "crash"


@dataclass
class Result:
    id: str
    model: str
    task: str
    method: str
    point: list[tuple[str, str]]
    seed: int
    dev_metric: str = "loss"
    test_metric: str | None = None
    dev: float | None = None
    test: float | None = None
    best_step: int | None = None
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    gpu_gib: float | None = None
    curve: list[tuple[int, float, float | None, float | None]] = field(default_factory=list)
    tests: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    kind: str | None = None

    @property
    def grid(self) -> Point:
        return tuple(self.point)


def lower_is_better(metric: str) -> bool:
    return metric.endswith(("loss", *LOWER_IS_BETTER))


def blank(trial: Trial) -> Result:
    return Result(trial.id, trial.model, trial.task, trial.method, [*trial.point], trial.seed)


def summarise(trial: Trial, data: Data) -> Result:
    judge, config, run = Judge(data.dev, data.test), trial.config, trial.directory / "run"
    metric = config.metric_for_best_model or judge.metric or "loss"
    entries = read_metrics(run / "metrics.jsonl")
    steps = [entry for entry in entries if "loss" in entry]
    evaluations = [entry for entry in entries if "eval_loss" in entry]
    made, seconds = blank(trial), dict[int, float]()  # training seconds so far, by step
    for entry in steps:
        made.seconds += entry["seconds"] or 0.0
        seconds[entry["step"]] = made.seconds
    made.dev_metric, made.test_metric = metric.removeprefix("eval_"), common_metric(data.test)
    made.steps, made.tokens = len(steps), sum(entry["tokens"] for entry in steps)
    made.gpu_gib = max((entry["gpu_gib"] for entry in steps if "gpu_gib" in entry), default=None)
    with suppress(OSError):
        lines = map(str.strip, read_small(run / "log.txt", MOST_LOG_BYTES).decode(errors="replace").splitlines())
        made.warnings = list(dict.fromkeys(line for line in lines if line.startswith(WARNINGS)))
    made.curve = [
        (e["step"], seconds.get(e["step"], 0.0), finite(value_of(e, metric)), e["eval_loss"]) for e in evaluations
    ]
    made.best_step = _chosen_step(trial, evaluations, metric, steps[-1]["step"] if steps else None)
    made.dev = next((dev for step, _, dev, _ in made.curve if step == made.best_step), None)
    for entry in (entry for entry in entries if is_test(entry) and entry["step"] == made.best_step):
        made.tests = finite_tests(entry)
        made.test = made.tests.get(f"test_{made.test_metric}")
    return made


def finite_tests(found: Entry) -> dict[str, float]:
    """The test metrics of an entry, without those that are not finite (null in a metrics file), or so large that their
    mean would not be (perplexities of a diverged run)."""
    tests = {name: value for name, value in found.items() if name.startswith("test_")}
    return {name: value for name, value in tests.items() if finite(value) is not None}


def _chosen_step(trial: Trial, evaluations: list[Entry], metric: str, last: int | None) -> int | None:
    if not evaluations or not trial.config.load_best_model_at_end:
        return int(evaluations[-1]["step"]) if evaluations else last
    return next(iter(Selection(trial.config, metric, evaluations).best_steps()), evaluations[-1]["step"])


def path_of(root: Path, run: str) -> Path:
    return root / "results" / f"{run}.json"


def write_result(root: Path, result: Result) -> None:
    with writing_to(root):
        path_of(root, result.id).parent.mkdir(parents=True, exist_ok=True)
        write_text(path_of(root, result.id), json_text(asdict(result), indent=1) + "\n")


def read_result(root: Path, run: str) -> Result | None:
    """The result of a finished run; None if there is none, or if it has invalid values."""
    try:
        made: Result = decode(json.loads(read_small(path_of(root, run), MOST_BYTES)), Result)
    except (OSError, ValueError, RecursionError):
        return None
    return made if made.id == run else None


def inspect(root: Path) -> str:
    """The day on which the comparison of a directory began; refuses one with other files, and one that is not writable.
    A marker that cannot be read counts as new."""
    rundir.check_place(root)
    strangers = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if strangers and not (root / MARKER).is_file():
        raise UserError(
            f"output_dir: {root} holds files that no comparison wrote (such as {strangers[0]}); choose a new directory"
        )
    day = today()
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        day = datetime.date.fromisoformat(json.loads(read_small(root / MARKER, MOST_MARKER_BYTES))["day"])
    return day.isoformat()


def mark(root: Path, title: str, day: str | None) -> None:
    with writing_to(root):
        (root / "runs").mkdir(parents=True, exist_ok=True)
        write_text(root / MARKER, json_text({"format": FORMAT, "title": title, "day": day}) + "\n")
