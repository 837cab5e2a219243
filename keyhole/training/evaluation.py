"""Evaluations during a run, and what follows from them: the best step's weights, the end by patience, the published
model and its test.

The published model is scored on the test questions of the run's tasks. If no model is saved (save_model: false), the
best weights could not be loaded again, so they are tested as soon as a step is the best so far.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.config import TrainConfig
from keyhole.data.run import Data
from keyhole.data.tasks.question import Task
from keyhole.eval.score import Score
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.report.story import Answers
from keyhole.training.follow import Command, Commands, take_weights
from keyhole.training.metrics import MetricsFile
from keyhole.training.observer import Observer, Progress, Reading
from keyhole.training.reports import Reports
from keyhole.training.sample_answers import answers_of, generated
from keyhole.training.saving import Saver
from keyhole.training.selection import Selection
from keyhole.training.validation import EVAL, TEST, Judge, evaluate, shown, shown_loss

MOST_ANSWERS = 20  # of all tasks, for the page


@dataclass(kw_only=True)
class Evaluation(Observer):
    """The evaluations of a run. gave_up: a signal ended the last one, or the last test."""

    config: TrainConfig
    root: Path
    model: Model
    method: Method
    data: Data
    judge: Judge
    commands: Commands
    metrics: MetricsFile
    reports: Reports
    selection: Selection
    saver: Saver
    gave_up: bool = False
    last: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.say = self.reports.display.line
        self.answered_s = 0.0  # seconds of training when answers were last generated

    def after_step(self, run: Progress) -> None:
        """Evaluates where that is due, and keeps the weights of the best step so far."""
        step = run.done
        due = bool(self.data.eval) and (run.is_last or step % (self.config.eval_steps or run.total) == 0)
        if due and step not in self.metrics.evaluated:
            with run.paused():
                self.evaluate(run)
        if self.config.load_best_model_at_end and self.selection.best_steps()[:1] == [step]:
            if not self.config.save_model:
                with run.paused():
                    self.test(run, step)
            elif self.saver.best_step != step:
                with run.paused():
                    self.reports.display.lines(self.saver.save_best(step))
        run.ends = run.ends or self.selection.out_of_patience()

    def is_asked(self) -> bool:
        return self.commands.is_asked

    def evaluate(self, run: Progress) -> None:
        """Loss on the held-out data, and the tasks' metrics on dev. A signal aborts it, and the resumed run repeats
        it."""
        self.commands.call(Command.EVALUATE)
        found = evaluate(self.model, self.data.eval, self.is_asked)
        answers = Answers(run.done, "the first questions of dev")

        def keep(task: Task, result: Score) -> None:
            count = min(self.config.sample_answers, MOST_ANSWERS - len(answers.rows))
            self.reports.tell("sample answers", lambda: answers.rows.extend(answers_of(task, result, count)))

        metrics = None if found is None else self.judge.dev_metrics(self.model, self.is_asked, keep)
        self.gave_up = metrics is None
        if found is not None and metrics is not None:
            self.last = found = found | metrics
            self.selection.note(run.done, found)
            run.note(Reading({"step": run.done, **found}))
            scores = f"; {text}" if (text := shown(found, EVAL)) else ""
            self.say(f"eval at step {run.done}: {shown_loss(found)}{scores}")
            self.reports.tell("sample answers", lambda: self._show(answers))

    def _show(self, answers: Answers) -> None:
        """Sends answers to the page: those of tasks, or generated answers to prompts of the held-out data."""
        held_out, count, curves = self.data.eval.dataset, self.config.sample_answers, self.reports.page.view.curves
        if not answers.rows and held_out is not None and count:
            since_s, self.answered_s = curves.seconds - self.answered_s, curves.seconds
            answers = generated(self.model, held_out, answers.step, count, since_s, curves.step_seconds or 0.0)
        if answers.rows:
            self.reports.page.story.answered(answers)

    def test(self, run: Progress, step: int) -> None:
        """The tasks' metrics on the test questions, with the weights of this step, which are loaded unless the run has
        them. A signal aborts it, and the resumed run repeats it."""
        tested = self.metrics.tested
        if not self.judge.test or self.judge.is_done(tested.get(step)):
            return
        run.flush()
        if step != run.done:
            self.commands.call(Command.GO_BACK, step)
            take_weights(self.model, self.method, self.root / f"checkpoint-{step}")
        self.commands.call(Command.TEST)
        found = self.judge.test_metrics(self.model, self.is_asked)
        self.gave_up = found is None
        if found is not None:
            tested[step] = {"step": step, **found}
            run.note(Reading(tested[step]))
            self.say(f"test of step {step}: {shown(found, TEST)}")

    def publish(self, run: Progress) -> int | None:
        """Puts the weights of the best step, or the last ones, into the output directory and tests them; the best step,
        None if the last weights are wanted. A damaged checkpoint is reported and set aside, and the next best step is
        tried, down to the last one, which has just been saved."""
        last, best = run.done, self.saver.best_saved()
        if not self.config.save_model:
            if best in (None, last):  # else these weights are not the best step's
                self.test(run, last)
            return best
        damaged: set[int] = set()
        while best is not None and best != last and (fault := self.saver.damage_of(best)) is not None:
            damaged.add(best)
            self.say(
                f"warning: checkpoint-{best}, the best, is damaged and not published: {fault}; the next best is "
                f"published instead, and the last weights are in checkpoint-{last}"
            )
            best = self.saver.best_saved(damaged)
        self.saver.publish(best)
        self.test(run, best or last)
        return best

    def outcome(self, last: int, best: int | None) -> str:
        """For the line at the end: the last evaluation, the best step and the test."""
        text = "" if self.last is None else f"; eval {shown_loss(self.last)}"
        if best is not None:
            values, first = self.selection.values, self.selection.best_steps()[0]
            text += f"; the best was {self.selection.shown(best)}, at step {best}"
            if values[best] != values[first]:
                text += f" (step {first} was better, and has no intact checkpoint)"
        tested = shown(self.metrics.tested.get(best or last, {}), TEST)
        return text + (f"; test {tested}" if tested else "")
