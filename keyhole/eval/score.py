"""One call for every task: `score(model, task)` ranks candidates, generates answers or computes likelihoods, depending
on the task. Each result has `metric`, the name of the task's main metric, and `metrics` with all of them (metrics.py).

**Choice.** The most likely candidate is the model's answer. For prompt x and candidate c of n tokens, with p the
model's next-token probability,

    sum(c)  = sum_t log p(c_t | x, c_<t)          mean(c) = sum(c) / n

`accuracy` chooses by the mean, as MeZO and LOMO do, since a sum favours short candidates; `accuracy_sum` chooses by the
sum. `margin` is the average over questions of mean(right) - max mean(wrong): it changes before the accuracy does.
`loss` is the NLL per token of the right candidates; `chance` the accuracy of guessing.

**Classifiers** answer with the label of the largest logit, a regression with its number: those numbers are correlated
with the task's values, and for other metrics the nearest candidate is the choice. `loss` is the mean training loss.

**Likelihood**: the loss of the right answers, and perplexity. **Generated** answers (generate.py) are compared with the
references, or make a program that is run (programs.py).
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.data.capacity import check_ids, check_max_length, context_length
from keyhole.data.dataset import Sample
from keyhole.data.tasks.encode import Encoder, TextEncoder
from keyhole.data.tasks.question import MARK, Question, Task, find_labels, number_of
from keyhole.data.tasks.spec import CHOICE, LIKELIHOOD
from keyhole.errors import UserError
from keyhole.eval import metrics
from keyhole.eval.generate import answer_limit, generate_answers
from keyhole.eval.programs import run_program
from keyhole.eval.rows import class_logits, not_finite, score_rows
from keyhole.model.model import Model

PROGRAMS_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Result:
    """What all results have. truncated: how many texts were cut."""

    name: str
    metric: str
    metrics: dict[str, float]
    truncated: int

    @property
    def value(self) -> float:
        return self.metrics[self.metric]


@dataclass(frozen=True, kw_only=True)
class TaskScore(Result):
    """Of candidates; `predictions` are those chosen by the mean, question by question."""

    questions: int
    accuracy: float
    accuracy_sum: float
    chance: float
    margin: float
    loss: float
    predictions: list[int]


@dataclass(frozen=True, kw_only=True)
class ClassScore(Result):
    """Of a classifier; `predictions` are classes of the task, or the numbers of a regression."""

    questions: int
    chance: float | None
    loss: float
    predictions: list[int] | list[float]


@dataclass(frozen=True, kw_only=True)
class AnswerScore(Result):
    """Of generated answers; `verdicts` is the score of each. shortened: the most tokens of an answer, if the model's
    context allows fewer than the task."""

    questions: int
    answers: list[str]
    verdicts: list[dict[str, float]]
    shortened: int | None = None


@dataclass(frozen=True, kw_only=True)
class DataScore(Result):
    """Loss over the trained tokens of a data file, or of the right answers of a task. losses: what was left out of a
    file between its rows and the loss, in words."""

    samples: int
    tokens: int
    loss: float
    perplexity: float
    losses: list[str] = field(default_factory=list)


Score = TaskScore | ClassScore | AnswerScore | DataScore


def score(
    model: Model, task: Task, *, max_length: int | None = None, allow_code_execution: bool = False, **options: Any
) -> Score:
    """The result of a task. options: batch_tokens, passes, watch (rows.py)."""
    check_code(task, allow_code_execution)
    limit = context_length(model.config)
    if model.classifies:
        return _classes(model, task, min(filter(None, (max_length, limit)), default=None), **options)
    check_max_length(max_length, model.config, model.module)
    longest = max_length or limit
    if task.spec.kind == CHOICE:
        return score_choices(model, task, longest, **options)
    return (_likelihood if task.spec.kind == LIKELIHOOD else _answers)(model, task, longest, **options)


def check_code(task: Task, allowed: bool) -> None:
    """Refuses to run programs that a model wrote, unless that was allowed."""
    if task.spec.program is not None and not allowed:
        raise UserError(
            f"task {task.name} runs programs that the model writes; they run confined, but it is a stranger's code: "
            "allow it with --allow-code-execution"
        )


def score_choices(model: Model, task: Task, longest: int | None = None, **options: Any) -> TaskScore:
    """Ranks the candidates of all questions. longest: in tokens; None: no limit."""
    encoder, questions, number = Encoder(model.tokenizer, longest), task.questions, len(task.questions)
    rows_by_question = encoder.encode(questions)
    for question, rows in zip(questions, rows_by_question, strict=True):
        check_ids([i for row in rows for i in row.input_ids], question.where, model.source, model.config)
    nll_R, count_R = score_rows(model, [row for rows in rows_by_question for row in rows], **options)
    sizes = [len(rows) for rows in rows_by_question]
    sums, counts = [-nll for nll in nll_R.split(sizes)], count_R.split(sizes)
    means = [score / count for score, count in zip(sums, counts, strict=True)]
    if bad := [q for q, score in zip(questions, sums, strict=True) if not score.isfinite().all()]:
        raise not_finite(model, f"{bad[0].where}: scores that are not finite ({len(bad)} of {number} questions)")
    rights = [{question.answer, *question.also} for question in questions]
    predictions = [int(mean.argmax()) for mean in means]
    margins = [
        max(m for i, m in enumerate(mean) if i in right)
        - max((m for i, m in enumerate(mean) if i not in right), default=mean.min())
        for mean, right in zip(means, rights, strict=True)
    ]
    return TaskScore(
        name=task.name,
        questions=number,
        accuracy=metric_of("accuracy", questions, predictions),
        accuracy_sum=metric_of("accuracy", questions, [int(score.argmax()) for score in sums]),
        chance=sum(len(right) / len(q.candidates) for right, q in zip(rights, questions, strict=True)) / number,
        margin=float(torch.stack(margins).mean()),
        loss=-float(sum(score[q.answer] for score, q in zip(sums, questions, strict=True)))
        / int(sum(count[q.answer] for count, q in zip(counts, questions, strict=True))),
        truncated=encoder.truncated,
        predictions=predictions,
        metric=task.spec.metric,
        metrics={name: metric_of(name, questions, predictions) for name in task.spec.metrics},
    )


def metric_of(name: str, questions: list[Question], predictions: list[int]) -> float:
    """A metric of choices. If several candidates are right and one of them is chosen, it counts as the right one."""
    if name == "pearson":
        chosen = [float(q.candidates[p]) for q, p in zip(questions, predictions, strict=True)]
        return metrics.pearson(chosen, [number_of(q.value, "value") for q in questions])
    right = [p if p in q.also else q.answer for q, p in zip(questions, predictions, strict=True)]
    return metrics.OF_CHOICES[name](predictions, right)


def _classes(model: Model, task: Task, longest: int | None, **options: Any) -> ClassScore:
    labels, questions = find_labels([task.spec], model.config), task.questions
    encoder = TextEncoder(model.tokenizer, model.config, longest)
    rows = [row for row in encoder.encode(questions, labels) if row is not None]  # it cuts, and drops none
    for question, row in zip(questions, rows, strict=True):
        check_ids(row.input_ids, question.where, model.source, model.config)
    logits_RL, nll_R = class_logits(model, rows, encoder.pad_token_id, **options)
    if bad := (~logits_RL.isfinite()).any(dim=1).nonzero()[:, 0].tolist():
        share = f"{len(bad)} of {len(rows)} questions"
        raise not_finite(model, f"{questions[bad[0]].where}: logits that are not finite ({share})")
    if labels.order:
        said = chosen = [labels.order.index(label) for label in logits_RL.argmax(dim=1).tolist()]
    else:
        said = logits_RL[:, 0].tolist()
        chosen = [
            min(range(len(question.candidates)), key=lambda i: abs(float(question.candidates[i]) - number))
            for number, question in zip(said, questions, strict=True)
        ]
    found = {name: metric_of(name, questions, chosen) for name in task.spec.metrics}
    if not labels.order:
        found["pearson"] = metrics.pearson(said, [number_of(question.value, "value") for question in questions])
    return ClassScore(
        name=task.name,
        questions=len(rows),
        metric=task.spec.metric,
        metrics=found,
        chance=1 / len(labels.order) if labels.order else None,
        loss=float(nll_R.sum()) / len(rows),
        truncated=encoder.truncated,
        predictions=said,
    )


def _answers(model: Model, task: Task, longest: int | None, **options: Any) -> AnswerScore:
    spec = task.spec
    limit = answer_limit(spec.max_new_tokens, longest)
    answers, cut = generate_answers(
        model, task.questions, max_new_tokens=limit, stop=spec.stop, max_length=longest, **options
    )
    worth = verdicts(task, answers)
    return AnswerScore(
        name=task.name,
        questions=len(answers),
        metric=spec.metric,
        metrics={name: sum(values) / len(values) for name, values in worth.items()},
        truncated=cut,
        answers=answers,
        verdicts=[{name: values[i] for name, values in worth.items()} for i in range(len(answers))],
        shortened=limit if limit < spec.max_new_tokens else None,
    )


def verdicts(task: Task, answers: Sequence[str]) -> dict[str, list[float]]:
    """The score of each answer, by metric. Programs are run here; the caller must have checked the permission."""
    if task.spec.program is not None:
        sources = [q.references[0].replace(MARK, text) for q, text in zip(task.questions, answers, strict=True)]
        with ThreadPoolExecutor(min(PROGRAMS_AT_ONCE, os.cpu_count() or 1)) as pool:
            outcomes = list(pool.map(run_program, sources))
        return {task.spec.metric: [float(outcome.passed) for outcome in outcomes]}
    worth: dict[str, list[float]] = {name: [] for name in task.spec.metrics}
    for question, text in zip(task.questions, answers, strict=True):
        answer = metrics.extract(text, task.spec.extract)
        references = [metrics.extract(reference, task.spec.extract) for reference in question.references]
        is_none = task.spec.extract is not None and not answer  # no answer, even if a reference has no match
        for name, values in worth.items():
            values.append(0.0 if is_none else metrics.OF_TEXTS[name](answer, references))
    return worth


def _likelihood(model: Model, task: Task, longest: int | None, **options: Any) -> DataScore:
    encoder = Encoder(model.tokenizer, longest)
    rows = [row for rows in encoder.encode(task.questions, task.spec.end_token) for row in rows]
    for question, row in zip(task.questions, rows, strict=True):
        check_ids(row.input_ids, question.where, model.source, model.config)
    return data_score(model, task.name, f"task {task.name}", rows, encoder.truncated, **options)


def data_score(
    model: Model,
    name: str,
    where: str,
    rows: Sequence[Sample],
    truncated: int,
    losses: Sequence[str] = (),
    **options: Any,
) -> DataScore:
    """The loss of rows; an error if it is not finite. where: what that calls them."""
    nll_R, count_R = score_rows(model, rows, **options)
    tokens = int(count_R.sum())
    loss = float(nll_R.sum()) / tokens
    if not math.isfinite(loss):
        raise not_finite(model, f"{where}: the loss is {loss}")
    found = metrics.perplexity(loss)
    return DataScore(
        name=name,
        metric="perplexity",
        metrics={"perplexity": found},
        truncated=truncated,
        samples=len(rows),
        tokens=tokens,
        loss=loss,
        perplexity=found,
        losses=list(losses),
    )
