"""Which step's weights are the result of a run, and when a run ends early.

    load_best_model_at_end     publishes the weights of the step with the best evaluation, not the last ones
    early_stopping_patience    ends the run after this many evaluations in a row without a new best
    max_minutes                ends the run after this training time, including time before an interruption

The first two depend only on the evaluations so far, a few pairs (step, value). These are in every checkpoint and in
run/metrics.jsonl, so a resumed run makes the same choice as an uninterrupted one. Scores of other dev questions, or
losses of other rows of eval_data than before cannot be compared with those, and are refused. Only a strictly better
value is a new best; of equal values the earliest step wins.

The checkpoint of a new best is written at once, and training waits for it: no later step is recorded before the best
weights are on the disk. It does not count towards save_total_limit. If it could not be written, the best step among the
existing checkpoints is published, with a message.
"""

import math
import time
from typing import Any

from keyhole.config import TrainConfig
from keyhole.disk.json_text import strict
from keyhole.errors import UserError
from keyhole.report.entries import Entry
from keyhole.training.validation import as_published

LOSSES = ("loss", "perplexity")


def value_of(found: dict[str, Any], metric: str) -> float | None:
    """A metric of an evaluation, with or without `eval_` before its name; None if it has no such number."""
    name = metric.removeprefix("eval_")
    return next((float(found[key]) for key in (f"eval_{name}", name) if found.get(key) is not None), None)


class Selection:
    """The evaluations of a run, and the decisions that follow from them."""

    def __init__(
        self,
        config: TrainConfig,
        metric: str = "loss",
        saved: dict[str, Any] | None = None,
        questions: list[str] | None = None,
        rows: str | None = None,
    ) -> None:
        """metric: what chooses if the config does not say. saved: what a checkpoint of the run holds (`state_dict`).
        questions: fingerprints of the dev questions, task by task; rows: that of the rows of eval_data."""
        self.config, self.metric, self.questions = config, config.metric_for_best_model or metric, questions or []
        falls, asked = self.metric.removeprefix("eval_").endswith(LOSSES), config.greater_is_better
        self.sign = 1 if (not falls if asked is None else asked) else -1  # multiplied by it, larger values are better
        saved = saved or {}
        before = saved.get("rows", []) if saved.get("evaluations") else []
        self.rows = [*before, *([] if rows is None or rows in before else [rows])]
        if config.load_best_model_at_end or config.early_stopping_patience is not None:
            if len(self.rows) > 1:
                raise UserError(
                    "--resume: the rows of eval_data are not those of the run so far, so their losses cannot be "
                    "compared; put back the file, or go on without load_best_model_at_end and early_stopping_patience"
                )
            if saved.get("evaluations") and saved.get("questions", self.questions) != self.questions:
                raise UserError(
                    "--resume: the dev questions are not those of the run so far, so their scores cannot be compared; "
                    "put back the files of task_data, or start a new run in another output_dir"
                )
        same = saved.get("metric", self.metric) == self.metric  # values of another metric do not compare
        pairs = saved.get("evaluations", []) if same else []  # null: not finite
        self.values = {int(step): math.nan if value is None else float(value) for step, value in pairs}
        self.seconds_before, self.began_s = float(saved.get("seconds", 0.0)), time.monotonic()

    def add_before(self, entries: list[Entry], after: int) -> None:
        """Adds evaluations, and seconds of steps, from entries of the metrics file that are later than the checkpoint
        of step `after`."""
        for entry in entries:
            if entry["step"] > after and "seconds" in entry:
                self.seconds_before += entry["seconds"] or 0.0
            if any(key.startswith("eval_") for key in entry):
                numbers = {key: math.nan if value is None else value for key, value in entry.items()}
                if (value := value_of(numbers, self.metric)) is not None:
                    self.values[entry["step"]] = value

    def start_clock(self) -> None:
        """Training begins."""
        self.began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, over all processes of the run."""
        return self.seconds_before + time.monotonic() - self.began_s

    def note(self, step: int, found: dict[str, Any]) -> None:
        """Adds an evaluation."""
        value = value_of(found, self.metric)
        if value is None:
            known = ", ".join(key for key, number in found.items() if isinstance(number, int | float))
            raise UserError(f"metric_for_best_model={self.metric}: an evaluation here gives {known}")
        self.values[step] = value

    def best_steps(self) -> list[int]:
        """Steps with an evaluation, the best first; of equal ones the earlier."""
        finite = {step: value for step, value in self.values.items() if math.isfinite(value)}
        return sorted(finite, key=lambda step: (-self.sign * finite[step], step))

    def out_of_time(self) -> str | None:
        """The reason to end the run if its time is over; else None."""
        minutes = self.config.max_minutes
        return None if minutes is None or self.seconds < 60 * minutes else f"max_minutes={minutes:g} have passed"

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

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        found = {"evaluations": strict(sorted(self.values.items())), "seconds": self.seconds}
        found |= {"metric": self.metric, "rows": self.rows}
        return found | ({"questions": self.questions} if self.questions else {})
