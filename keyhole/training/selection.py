"""Which step's model is the result of a run, and when a run has seen enough.

    load_best_model_at_end     the weights of the step with the best evaluation are published, not the last ones
    early_stopping_patience    the run ends after so many evaluations in a row without a new best
    max_minutes                the run ends when it has trained so long, the time before a stop included

The first two are functions of the evaluations so far, a few pairs (step, value), and of nothing else. They are in every
checkpoint and in run/metrics.jsonl, so a run that was stopped and resumed chooses as one that was not. A value counts
as better only if it is strictly so; of equal ones the earlier step stays.

The checkpoint of a new best is written at once, and training waits for it: no later step is recorded while the best
weights are not on the disk. It is not counted by save_total_limit. Where the disk did not take it, the best of those
that are there is published, and that is said.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

from keyhole.errors import UserError

LOSSES = ("loss", "perplexity")


@dataclass(frozen=True)
class SelectionSettings:
    """metric: a key of an evaluation, with or without `eval_` before it. greater: None decides by the metric's name."""

    best: bool = False
    metric: str = "loss"
    greater: bool | None = None
    patience: int | None = None
    minutes: float | None = None

    @property
    def sign(self) -> int:
        """What makes larger values better."""
        falls = self.metric.removeprefix("eval_").endswith(LOSSES)
        return 1 if (not falls if self.greater is None else self.greater) else -1


def value_of(found: dict[str, Any], metric: str) -> float | None:
    """A metric of an evaluation, with or without `eval_` before its name; None where it has no such number."""
    name = metric.removeprefix("eval_")
    return next((float(found[key]) for key in (f"eval_{name}", name) if found.get(key) is not None), None)


class Selection:
    """The evaluations of a run, and what follows from them."""

    def __init__(self, settings: SelectionSettings, saved: dict[str, Any] | None = None) -> None:
        """saved: what a checkpoint of the run holds (`state_dict`)."""
        self.settings = settings
        saved = saved or {}
        self.values = {int(step): float(value) for step, value in saved.get("evaluations", [])}
        self.seconds_before, self.began_s = float(saved.get("seconds", 0.0)), time.monotonic()

    def add_before(self, entries: list[dict[str, Any]], after: int) -> None:
        """Takes over what a journal or a metrics file knows beyond a checkpoint of step `after`: its evaluations, and
        the seconds of its steps."""
        for entry in entries:
            if entry["step"] > after and "seconds" in entry:
                self.seconds_before += entry["seconds"] or 0.0
            if any(key.startswith("eval_") for key in entry) and (value := self._find(entry)) is not None:
                self.values[entry["step"]] = value

    def start_clock(self) -> None:
        """Training begins."""
        self.began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of training so far, over all processes of the run."""
        return self.seconds_before + time.monotonic() - self.began_s

    def note(self, step: int, found: dict[str, Any]) -> bool:
        """Takes an evaluation; returns whether it is the best so far."""
        value = self._find(found)
        if value is None:
            known = ", ".join(key for key, number in found.items() if isinstance(number, int | float))
            raise UserError(f"metric_for_best_model={self.settings.metric}: an evaluation here gives {known}")
        self.values[step] = value
        return self.best_steps()[:1] == [step]

    def _find(self, found: dict[str, Any]) -> float | None:
        return value_of(found, self.settings.metric)

    def best_steps(self) -> list[int]:
        """Steps with an evaluation, the best first; of equal ones the earlier."""
        finite = {step: value for step, value in self.values.items() if math.isfinite(value)}
        return sorted(finite, key=lambda step: (-self.settings.sign * finite[step], step))

    def out_of_time(self) -> str | None:
        """Why the run ends, where its time is over."""
        minutes = self.settings.minutes
        return None if minutes is None or self.seconds < 60 * minutes else f"max_minutes={minutes:g} have passed"

    def out_of_patience(self) -> str | None:
        """Why the run ends, where nothing has been better for too long."""
        best, patience = self.best_steps(), self.settings.patience
        if not best or patience is None or sum(step > best[0] for step in self.values) < patience:
            return None
        name, found = self.settings.metric.removeprefix("eval_"), self.values[best[0]]
        return f"early_stopping_patience={patience}: no {name} was better than {found:.4f}, at step {best[0]}"

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"evaluations": sorted(self.values.items()), "seconds": self.seconds}
