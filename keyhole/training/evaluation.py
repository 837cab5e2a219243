"""Evaluations during a run, and what follows from them: the best step's weights, the end by patience, the published
model and its test; and the model's answers to the first dev questions of tasks, for the run's page.

The published model is scored on the test questions of the run's tasks. If no model is saved (save_model: false), the
best weights could not be loaded again, so they are tested as soon as a step is the best so far.
"""

from dataclasses import dataclass
from typing import Any

from keyhole.checkpoint.state import Damaged, verify
from keyhole.data.tasks.question import Question, Task
from keyhole.eval.score import AnswerScore, ClassScore, Score, TaskScore
from keyhole.report.story import Answer, Answers
from keyhole.training.metrics import Reading
from keyhole.training.records import MetricsFile
from keyhole.training.reports import Reports
from keyhole.training.run import Command, Observer, Run
from keyhole.training.saving import Saver
from keyhole.training.validation import EVAL, TEST, Selection, evaluate, shown, shown_loss

MOST_ANSWERS = 20  # of all tasks, for the page
MOST_CHARACTERS = 600


@dataclass
class Evaluation(Observer):
    """The evaluations of a run. gave_up: a signal ended the last one, or the last test."""

    run: Run
    metrics: MetricsFile
    reports: Reports
    selection: Selection
    saver: Saver
    gave_up: bool = False
    last: dict[str, Any] | None = None

    def after_step(self) -> None:
        run, config, step = self.run, self.run.config, self.run.done
        due = bool(run.data.eval) and (run.is_last or step % (config.eval_steps or run.total) == 0)
        if due and step not in self.metrics.evaluated:
            with run.paused():
                self.evaluate()
        best = self.selection.best_steps()[:1] == [step]
        if best and config.load_best_model_at_end and not config.save_model:
            with run.paused():
                self.test(step)
        run.ends = run.ends or self.selection.out_of_patience()

    def evaluate(self) -> None:
        """Loss on the held-out data, and the tasks' metrics on dev. A signal aborts it, and the resumed run repeats
        it."""
        run = self.run
        run.call(Command.EVALUATE)
        found = evaluate(run.model, run.data.eval, run.is_asked)
        answers = Answers(run.done, "the first questions of dev")

        def keep(task: Task, result: Score) -> None:
            count = min(run.config.sample_answers, MOST_ANSWERS - len(answers.rows))
            self.reports.tell("sample answers", lambda: answers.rows.extend(answers_of(task, result, count)))

        metrics = None if found is None else run.judge.dev_metrics(run.model, run.is_asked, keep)
        self.gave_up = metrics is None
        if found is not None and metrics is not None:
            self.last = found = found | metrics
            self.selection.note(run.done, found)
            run.note(Reading({"step": run.done, **found}))
            scores = f"; {text}" if (text := shown(found, EVAL)) else ""
            run.say(f"eval at step {run.done}: {shown_loss(found)}{scores}")
            if answers.rows:
                self.reports.page.story.answered(answers)

    def test(self, step: int) -> None:
        """The tasks' metrics on the test questions, with the weights of this step, which are loaded unless the run has
        them. A signal aborts it, and the resumed run repeats it."""
        run, tested = self.run, self.metrics.tested
        if not run.judge.test or run.judge.is_done(tested.get(step)):
            return
        run.flush()
        run.go_back(step)
        run.call(Command.TEST)
        found = run.judge.test_metrics(run.model, run.is_asked)
        self.gave_up = found is None
        if found is not None:
            tested[step] = {"step": step, **found}
            run.note(Reading(tested[step]))
            run.say(f"test of step {step}: {shown(found, TEST)}")

    def publish(self) -> int | None:
        """Puts the weights of the best step, or the last ones, into the output directory and tests them; the best step,
        None if the last weights are wanted, or the checkpoint of the best is damaged."""
        last, best = self.run.done, self.saver.best_saved()
        if not self.run.config.save_model:
            if best in (None, last):  # else these weights are not the best step's
                self.test(last)
            return best
        try:
            if best not in (None, last):
                verify(self.run.checkpoint(best))
        except Damaged as fault:
            self.run.say(
                f"warning: checkpoint-{best}, the best, is damaged and not published: {fault}; the last weights are "
                "published instead"
            )
            best = None
        self.saver.publish(best)
        self.test(best or last)
        return best

    def outcome(self, best: int | None) -> str:
        """For the line at the end: the last evaluation, the best step and the test."""
        text = "" if self.last is None else f"; eval {shown_loss(self.last)}"
        if best is not None:
            text += f"; the best that is saved was {self.selection.shown(best)}, at step {best}"
        tested = shown(self.metrics.tested.get(best or self.run.done, {}), TEST)
        return text + (f"; test {tested}" if tested else "")


def answers_of(task: Task, result: Score, count: int) -> list[Answer]:
    questions, rows = task.questions[:count], []
    if isinstance(result, AnswerScore):
        for q, said, worth in zip(questions, result.answers, result.verdicts, strict=False):
            expected = " | ".join(q.references[:3])
            rows.append(Answer(_prompt(q), _cut(said), _cut(expected), bool(max(worth.values()) >= 1)))
    elif isinstance(result, TaskScore | ClassScore):
        for q, choice in zip(questions, result.predictions, strict=False):
            if isinstance(choice, float):  # a number is what is asked for
                rows.append(Answer(_prompt(q), f"{choice:.3f}", "" if q.value is None else f"{q.value:g}"))
            else:
                said, expected = q.candidates[choice], q.candidates[q.answer]
                rows.append(Answer(_prompt(q), _cut(said), _cut(expected), choice in (q.answer, *q.also)))
    return rows


def _prompt(question: Question) -> str:
    """The end of a prompt, where the question is."""
    turns = [] if isinstance(question.prompt, str) else [str(turn.get("content", "")) for turn in question.prompt]
    text = " | ".join(question.texts or turns) or str(question.prompt)
    return text if len(text) <= MOST_CHARACTERS else f"… {text[-MOST_CHARACTERS:]}"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} …"
