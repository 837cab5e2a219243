"""Evaluations during a run, and what follows from them: the best step's weights, the end by patience, the published
model and its test; and answers of the model for the run's page: what training does to what the model says.

The published model is scored on the test questions of the run's tasks. If no model is saved (save_model: false), the
best weights could not be loaded again, so they are tested as soon as a step is the best so far.

Answers of tasks are a by-product of scoring. For other data the model generates greedy answers to a few prompts, if
that is cheap: in the memory that a step leaves free, within SHARE of the time since the last evaluation (at least
LEAST_S seconds), and only if ANSWER_TOKENS tokens fit into that time, where a token is assumed to take as long as a
step. A failure there does not end the run (reports.py).
"""

from dataclasses import dataclass
from typing import Any

from keyhole.data.capacity import context_length
from keyhole.data.dataset import Dataset
from keyhole.data.tasks.question import Question, Task
from keyhole.eval.choices import ClassScore, TaskScore
from keyhole.eval.generate import answer_prompts
from keyhole.eval.score import AnswerScore, Score
from keyhole.model.model import Model
from keyhole.report.story import Answer, Answers
from keyhole.training.metrics import Reading
from keyhole.training.records import MetricsFile
from keyhole.training.reports import Reports
from keyhole.training.run import Command, Observer, Run
from keyhole.training.saving import Saver
from keyhole.training.validation import EVAL, TEST, Selection, evaluate, shown, shown_loss

MOST_ANSWERS = 20  # of all tasks, for the page
MOST_CHARACTERS = 600
MOST_PROMPT, OPENING, NEW_TOKENS, LEAST_NEW, ANSWER_TOKENS = 384, 12, 48, 4, 4
SHARE, LEAST_S, MOST_S = 0.05, 2.0, 30.0


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
    answered_s: float = 0.0  # seconds of training when answers were last generated

    def after_step(self) -> None:
        """Evaluates where that is due, and keeps the weights of the best step so far."""
        run, config, step = self.run, self.run.config, self.run.done
        due = bool(run.data.eval) and (run.is_last or step % (config.eval_steps or run.total) == 0)
        if due and step not in self.metrics.evaluated:
            with run.paused():
                self.evaluate()
        if config.load_best_model_at_end and self.selection.best_steps()[:1] == [step]:
            if not config.save_model:
                with run.paused():
                    self.test(step)
            elif self.saver.best_step != step:
                with run.paused():
                    self.saver.save_best(step)
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
            self.reports.tell("sample answers", lambda: self._show(answers))

    def _show(self, answers: Answers) -> None:
        """Sends answers to the page: those of tasks, or generated answers to prompts of the held-out data."""
        held_out, count = self.run.data.eval.dataset, self.run.config.sample_answers
        if not answers.rows and held_out is not None and count:
            curves = self.reports.page.view.curves
            since_s, self.answered_s = curves.seconds - self.answered_s, curves.seconds
            answers = generated(self.run.model, held_out, answers.step, count, since_s, curves.step_seconds or 0.0)
        if answers.rows:
            self.reports.page.story.answered(answers)

    def test(self, step: int) -> None:
        """The tasks' metrics on the test questions, with the weights of this step, which are loaded unless the run has
        them. A signal aborts it, and the resumed run repeats it."""
        run, tested = self.run, self.metrics.tested
        if not run.judge.test or run.judge.is_done(tested.get(step)):
            return
        run.flush()
        if step != run.done:
            run.call(Command.GO_BACK, step)
            run.take_weights(step)
        run.call(Command.TEST)
        found = run.judge.test_metrics(run.model, run.is_asked)
        self.gave_up = found is None
        if found is not None:
            tested[step] = {"step": step, **found}
            run.note(Reading(tested[step]))
            run.say(f"test of step {step}: {shown(found, TEST)}")

    def publish(self) -> int | None:
        """Puts the weights of the best step, or the last ones, into the output directory and tests them; the best step,
        None if the last weights are wanted. A damaged checkpoint is reported and set aside, and the next best step is
        tried, down to the last one, which has just been saved."""
        last, best = self.run.done, self.saver.best_saved()
        if not self.run.config.save_model:
            if best in (None, last):  # else these weights are not the best step's
                self.test(last)
            return best
        damaged: set[int] = set()
        while best is not None and best != last and (fault := self.saver.damage_of(best)) is not None:
            damaged.add(best)
            self.run.say(
                f"warning: checkpoint-{best}, the best, is damaged and not published: {fault}; the next best is "
                f"published instead, and the last weights are in checkpoint-{last}"
            )
            best = self.saver.best_saved(damaged)
        self.saver.publish(best)
        self.test(best or last)
        return best

    def outcome(self, best: int | None) -> str:
        """For the line at the end: the last evaluation, the best step and the test."""
        text = "" if self.last is None else f"; eval {shown_loss(self.last)}"
        if best is not None:
            values, first = self.selection.values, self.selection.best_steps()[0]
            text += f"; the best was {self.selection.shown(best)}, at step {best}"
            if values[best] != values[first]:
                text += f" (step {first} was better, and has no intact checkpoint)"
        tested = shown(self.metrics.tested.get(best or self.run.done, {}), TEST)
        return text + (f"; test {tested}" if tested else "")


def answers_of(task: Task, result: Score, count: int) -> list[Answer]:
    """The first answers of a scored task."""
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
    if question.texts:
        return _end(" | ".join(question.texts))
    if isinstance(question.prompt, str):
        return _end(question.prompt)
    return _end(" | ".join(str(turn.get("content", "")) for turn in question.prompt))


def _cut(text: str) -> str:
    """The beginning of an answer."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} …"


def _end(text: str) -> str:
    """The end of a prompt, where the question is."""
    return text if len(text) <= MOST_CHARACTERS else f"… {text[-MOST_CHARACTERS:]}"


def generated(model: Model, dataset: Dataset, step: int, count: int, since_s: float, step_s: float) -> Answers:
    """Greedy answers to the first prompts of a data set; none if that is not cheap. since_s: seconds of training
    since the last answers; step_s: seconds of one step."""
    allowed_s, tokenizer = min(MOST_S, max(LEAST_S, SHARE * since_s)), model.tokenizer
    if model.classifies or tokenizer is None or model.ranks.several or ANSWER_TOKENS * step_s > allowed_s:
        return Answers(step, "")
    longest = context_length(model.config) or MOST_PROMPT + NEW_TOKENS
    found = (_asked(dataset, i) for i in range(min(20 * count, len(dataset))))
    rows = [row for row in found if row is not None and len(row[0]) + LEAST_NEW <= longest][:count]
    while rows and not _fits(model, rows):
        rows.pop()
    if not rows:
        return Answers(step, "")
    room = longest - max(len(prompt) for prompt, _ in rows)  # a position beyond a learned table ends in a CUDA error
    new = min(NEW_TOKENS, max(len(expected) for _, expected in rows) + 4, room)
    made = Answers(step, f"greedy, at most {new} tokens and {allowed_s:.0f} s")
    texts = answer_prompts(model, [prompt for prompt, _ in rows], new, max_time=allowed_s)
    for (prompt, expected), said in zip(rows, texts, strict=True):
        right = tokenizer.decode(expected, skip_special_tokens=True)
        same = True if said.strip() == right.strip() else None  # a different answer is not necessarily wrong
        made.rows.append(Answer(_end(tokenizer.decode(prompt)), _cut(said), _cut(right), same))
    return made


def _asked(dataset: Dataset, index: int) -> tuple[list[int], list[int]] | None:
    """The prompt of a row and its answer in the data; None if it is too long, or has no prompt."""
    row = dataset.rows[index]
    sample = row[0] if dataset.right is None else row[dataset.right[index]]
    part = slice(dataset.starts[sample], dataset.starts[sample + 1])
    ids, trained = dataset.ids[part].tolist(), dataset.trained[part].tolist()
    if True not in trained:
        return None
    begin = trained.index(True)
    begin = begin if begin > 1 else min(OPENING, len(ids) - 1)  # plain text: its beginning is the prompt
    end = next((i for i in range(begin, len(ids)) if not trained[i]), len(ids))
    return (ids[:begin], ids[begin:end]) if 0 < begin <= MOST_PROMPT else None


def _fits(model: Model, rows: list[tuple[list[int], list[int]]]) -> bool:
    """Whether the tokens and their KV cache fit into the GPU memory that the finished training step used."""
    if model.device.type != "cuda":
        return True
    assert model.placed is not None
    tokens, config = len(rows) * (max(len(prompt) for prompt, _ in rows) + NEW_TOKENS), model.config.get_text_config()
    cached = 2 * config.num_hidden_layers * config.hidden_size * tokens * model.dtype.itemsize
    return bool(tokens <= model.placed.work.tokens and cached <= model.placed.device_bytes.during_a_step)
