"""Loss and perplexity on held-out data, defined as the training loss is, and the metrics of tasks.

    eval_loss = sum of NLL over all trained tokens of the set / their number      perplexity = exp(eval_loss)

A classifier's loss is a mean over rows, and has no perplexity.
Sums are accumulated in float64 on the host. With streamed units, up to EVAL_PASSES batches go through the model
together, as many as the memory plan has room for: they share every upload, and the result does not depend on the
grouping.

If a run has tasks, their dev questions select the best step and their test questions score it, as `keyhole eval` does
(eval/score.py), in batches of the planned size. The numbers are named as in Hugging Face's Trainer:

    one task         eval_accuracy, test_accuracy (and its further metrics)
    several tasks    eval_sst2_accuracy, eval_rte_accuracy, and their mean: eval_accuracy, or eval_score where the tasks
                     have different metrics

What follows from the numbers of evaluations: which step's weights are the result of a run, and when it ends early.

    load_best_model_at_end     publishes the weights of the step with the best evaluation, not the last ones
    early_stopping_patience    ends the run after this many evaluations in a row without a new best
    max_minutes                ends the run after this time; of earlier processes the time of their steps counts

All three depend only on run/metrics.jsonl, so a resumed run makes the same choice as an uninterrupted one. Scores of
other dev questions, or losses of other rows of eval_data than before cannot be compared with those, and are refused.
Only a strictly better value is a new best; of equal values the earliest step wins.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from keyhole.config import TrainConfig
from keyhole.data.tasks.question import Task
from keyhole.data.tasks.spec import GENERATED, LIKELIHOOD, LOWER_IS_BETTER
from keyhole.disk.json_text import Json
from keyhole.errors import UserError
from keyhole.eval.metrics import MEAN, as_published, perplexity
from keyhole.eval.score import Score, check_code, score
from keyhole.machine.text import counted
from keyhole.model.model import Model
from keyhole.report.entries import Entry

EVAL_PASSES = 8
EVAL, TEST = "eval", "test"
Stop = Callable[[], bool]
Keep = Callable[[Task, Score], None]


class Batches(Sized, Iterable[Any], Protocol):
    """What EvalBatches is, or a list."""


def evaluate(model: Model, batches: Batches, stop: Stop = lambda: False) -> Entry | None:
    """{"eval_loss", "perplexity", "eval_tokens"} over all batches, of a classifier {"eval_loss", "eval_rows"}; None
    if `stop` returned True midway. Several ranks take batches in turn, and sum all losses in the order of the
    batches."""
    assert model.placed is not None
    ranks, together = model.ranks, model.placed.evaluation_passes(model.layout, EVAL_PASSES)
    together = min(ranks.objects(together)) if model.sharded else together
    own = ranks.share(range(len(batches)))
    left = islice(batches, own[0], own[-1] + 1) if own else iter(())
    found: list[tuple[float, int]] = []
    sweeps = 0
    while group := list(islice(left, together)):
        if not model.sharded and stop():
            break
        found += [(float(nll_B.double().sum()), int(count_B.sum())) for nll_B, count_B in model.nll(group)]
        sweeps += 1
    most = math.ceil(math.ceil(len(batches) / ranks.size) / together)  # sweeps of the rank with the most batches
    for _ in range(most - sweeps if model.sharded else 0):  # all ranks must take part in every visit of a unit
        model.nll(list(islice(batches, 1)))
    pairs = [pair for each in ranks.objects(found) for pair in each]
    if len(pairs) < len(batches):
        return None
    nll, tokens = 0.0, sum(count for _, count in pairs)
    for each, _ in pairs:
        nll += each  # from left to right: Python's sum may be more exact, and then differs
    loss = nll / max(1, tokens)
    if model.classifies:
        return {"eval_loss": loss, "eval_rows": tokens}
    return {"eval_loss": loss, "perplexity": perplexity(loss), "eval_tokens": tokens}


class Stopped(Exception):
    """Raised inside scoring when the run is asked to stop."""


@dataclass(frozen=True)
class Judge:
    """The tasks that select (dev) and score (test) the model of a run."""

    dev: tuple[Task, ...] = ()
    test: tuple[Task, ...] = ()
    max_length: int | None = None
    allow_code_execution: bool = False

    @property
    def chosen_by(self) -> tuple[Task, ...]:
        return tuple(task for task in self.dev if task.spec.program is None)

    @property
    def metric(self) -> str | None:
        """The number that selects the best step, if there are dev questions: the tasks' metric, or a mean of
        several."""
        return common_metric(self.chosen_by)

    def names(self, classifies: bool) -> list[str]:
        """The numbers of an evaluation that can select the best step."""
        found, common = (["loss"] if classifies else ["loss", "perplexity"]), self.metric
        for task in self.chosen_by:
            found += [name if len(self.chosen_by) == 1 else f"{task.name}_{name}" for name in task.spec.metrics]
        return list(dict.fromkeys([*found, *([] if common is None else [common])]))

    def check(self, config: TrainConfig, held_out: bool, classifies: bool) -> None:
        """Before training begins: refuses tasks that run programs, unless that was allowed, and a selection without
        evaluations, or by a number that no evaluation has. held_out: there are rows to evaluate on."""
        for task in self.test:
            check_code(task, self.allow_code_execution)
        metric = config.metric_for_best_model
        chooses = config.load_best_model_at_end or config.early_stopping_patience is not None
        if (chooses or metric is not None) and not held_out:
            raise UserError(
                "load_best_model_at_end, early_stopping_patience, metric_for_best_model: no dev question is left to "
                "choose by (dev takes two of five training rows at most); add rows, or leave these settings out"
            )
        if metric is not None and metric.removeprefix("eval_") not in (known := self.names(classifies)):
            raise UserError(f"metric_for_best_model={metric}: an evaluation here gives {', '.join(known)}")

    def dev_metrics(
        self, model: Model, stop: Stop, keep: Keep = lambda task, result: None, *, has_loss: bool = True
    ) -> Entry | None:
        """eval_<metric> of the dev questions; None if `stop` returned True midway. keep: called with every task and its
        score. has_loss: the loss of the dev questions is computed elsewhere, and with it a perplexity."""
        tasks = self.chosen_by
        only_loss = len(tasks) == 1 and tasks[0].spec.kind == LIKELIHOOD
        return {} if only_loss and has_loss else self._score(model, tasks, EVAL, stop, keep)

    def test_metrics(self, model: Model, stop: Stop) -> Entry | None:
        """test_<metric> of the test questions; None if `stop` returned True midway."""
        return self._score(model, self.test, TEST, stop, lambda task, result: None)

    def is_done(self, entry: Entry | None) -> bool:
        """Whether an entry of the metrics file is a test of as many questions of the same tasks: a resumed run may
        name others (num_eval, test_task)."""
        wanted = _named(self.test, {task.name: dict.fromkeys(task.spec.metrics, 0.0) for task in self.test}, TEST)
        count = f"{TEST}_questions"
        return entry is not None and wanted.keys() <= entry.keys() and wanted[count] == entry[count]

    def _score(self, model: Model, tasks: Sequence[Task], prefix: str, stop: Stop, keep: Keep) -> Entry | None:
        def watch(groups: list[list[int]]) -> Iterator[list[int]]:
            for group in groups:
                if not model.ranks.several and stop():  # ranks stop together, between tasks
                    raise Stopped
                yield group

        assert model.placed is not None
        tokens, passes = model.placed.work.tokens, model.placed.evaluation_passes(model.layout, EVAL_PASSES)
        found: dict[str, dict[str, float]] = {}
        try:
            for task in tasks:
                if model.ranks.several and any(model.ranks.objects(stop())):
                    raise Stopped
                generated = task.spec.kind == GENERATED
                result = score(
                    model,
                    task,
                    max_length=self.max_length,
                    allow_code_execution=self.allow_code_execution,
                    batch_tokens=tokens,
                    watch=watch,
                    **({} if generated else {"passes": passes}),
                )
                found[task.name] = result.metrics
                keep(task, result)
        except Stopped:
            return None
        return _named(tasks, found, prefix) if tasks else {}


def common_metric(tasks: Sequence[Task]) -> str | None:
    """The name of the common number of several tasks; None without tasks, or if their metrics cannot be averaged."""
    names = list(dict.fromkeys(task.spec.metric for task in tasks))
    if len(names) > 1:
        return None if any(name in LOWER_IS_BETTER for name in names) else MEAN
    return names[0] if names else None


def _named(tasks: Sequence[Task], found: dict[str, dict[str, float]], prefix: str) -> Entry:
    count = {f"{prefix}_questions": sum(len(task.questions) for task in tasks)}
    if len(tasks) == 1:
        return {f"{prefix}_{name}": value for name, value in found[tasks[0].name].items()} | count
    numbers = {f"{prefix}_{task}_{name}": value for task, each in found.items() for name, value in each.items()}
    if (common := common_metric(tasks)) is not None:
        own = [found[task.name][task.spec.metric] for task in tasks]
        numbers[f"{prefix}_{common}"] = sum(own) / len(own)
    return numbers | count


def shown_loss(found: Entry) -> str:
    if "eval_rows" in found:
        return f"loss {found['eval_loss']:.4f} over {found['eval_rows']:,} rows"
    numbers = f"loss {found['eval_loss']:.4f}, perplexity {found['perplexity']:.2f}"
    return f"{numbers} over {counted(found['eval_tokens'], 'token')}"


def shown(found: Entry, prefix: str) -> str:
    """The metrics of an entry, formatted: `accuracy 88.4 %, f1 87.1 % of 500 questions`; "" if there are none."""
    own = {name.removeprefix(f"{prefix}_"): value for name, value in found.items() if name.startswith(f"{prefix}_")}
    count = own.pop("questions", 0)
    numbers = [as_published(name, value) for name, value in own.items() if name not in ("loss", "tokens", "rows")]
    return f"{', '.join(numbers)} of {counted(count, 'question')}" if numbers and count else ""


LOSSES = ("loss", "perplexity")


def value_of(found: Entry, metric: str) -> float | None:
    """A metric of an evaluation, with or without `eval_` before its name; None if it has no such number. Null in a file
    is a number that was not finite."""
    name = metric.removeprefix("eval_")
    values = [found[key] for key in (f"eval_{name}", name) if key in found]
    return None if not values else math.nan if values[0] is None else float(values[0])


class Selection:
    """The evaluations of a run, and the decisions that follow from them."""

    def __init__(self, config: TrainConfig, metric: str = "loss", entries: Sequence[Entry] = ()) -> None:
        """metric: what chooses if the config does not say; entries: those of run/metrics.jsonl so far."""
        self.config, self.metric = config, config.metric_for_best_model or metric
        falls, asked = self.metric.removeprefix("eval_").endswith(LOSSES), config.greater_is_better
        self.sign = 1 if (not falls if asked is None else asked) else -1  # multiplied by it, larger values are better
        evaluations = {entry["step"]: value_of(entry, self.metric) for entry in entries if "eval_loss" in entry}
        self.values = {step: value for step, value in evaluations.items() if value is not None}
        self.seconds_before = sum(entry.get("seconds") or 0.0 for entry in entries)
        self.began_s = time.monotonic()

    def check_rows(self, now: Json, before: Json | None) -> Json:
        """What evaluations are made on, for the next checkpoint; refused if it is not what the last one says and its
        numbers would be compared. Once it has changed it stays different."""
        if not self.values or before is None or now == before:
            return now
        if self.config.load_best_model_at_end or self.config.early_stopping_patience is not None:
            what = "rows of eval_data" if now["questions"] == before.get("questions") else "dev questions"
            raise UserError(
                f"--resume: the {what} are not those of the run so far, so their losses and scores cannot be compared; "
                "put back the files, or go on without load_best_model_at_end and early_stopping_patience"
            )
        return now | {"rows": "changed"}

    def start_clock(self) -> None:
        self.began_s = time.monotonic()

    def note(self, step: int, found: Entry) -> None:
        value = value_of(found, self.metric)
        assert value is not None  # Judge.check knows what evaluations give
        self.values[step] = value

    def best_steps(self) -> list[int]:
        """Steps with an evaluation, the best first; of equal ones the earlier."""
        finite = {step: value for step, value in self.values.items() if math.isfinite(value)}
        return sorted(finite, key=lambda step: (-self.sign * finite[step], step))

    def out_of_time(self) -> str | None:
        """The reason to end the run if its time is over; else None."""
        minutes, seconds = self.config.max_minutes, self.seconds_before + time.monotonic() - self.began_s
        return None if minutes is None or seconds < 60 * minutes else f"max_minutes={minutes:g} have passed"

    def out_of_patience(self) -> str | None:
        """The reason to end the run if there was no new best for too long; else None."""
        best, patience = self.best_steps(), self.config.early_stopping_patience
        if not best or patience is None or sum(step > best[0] for step in self.values) < patience:
            return None
        return f"early_stopping_patience={patience}: nothing was better than {self.shown(best[0])}, at step {best[0]}"

    def shown(self, step: int) -> str:
        """The metric of a step, as the lines of evaluations have it."""
        name, value = self.metric.removeprefix("eval_"), self.values[step]
        return f"{name} {value:.4f}" if name == "loss" else as_published(name, value)
