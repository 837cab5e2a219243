"""One call for every task: `score(model, task)` ranks candidates, generates answers or computes likelihoods, depending
on the task.

    choice        choices.py: ranks candidates by their mean log-likelihood
    likelihood    the loss of the right answers, and perplexity
    generated     generate.py; then texts are compared (metrics.py), or programs are run (programs.py)
    a classifier  choices.py: the choice is one of its labels

Each result has `metric`, the name of the task's main metric, and `metrics` with all of them; `value` is the main value.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from keyhole.data.capacity import check_ids, check_max_length, context_length
from keyhole.data.tasks.encode import Encoder
from keyhole.data.tasks.question import MARK, Task
from keyhole.data.tasks.spec import CHOICE, LIKELIHOOD
from keyhole.errors import UserError
from keyhole.eval import metrics
from keyhole.eval.choices import ClassScore, TaskScore, score_classes, score_task
from keyhole.eval.generate import answer_limit, generate_answers
from keyhole.eval.programs import run_program
from keyhole.eval.rows import not_finite, score_rows
from keyhole.model.model import Model

PROGRAMS_AT_ONCE = 4


@dataclass(frozen=True)
class AnswerScore:
    """The result of a task whose answers are generated; `answers` are the texts, `verdicts` the score of each.
    shortened: the most tokens of an answer, if the model's context allows fewer than the task."""

    name: str
    questions: int
    metric: str
    metrics: dict[str, float]
    truncated: int
    answers: list[str]
    verdicts: list[dict[str, float]]
    shortened: int | None = None


@dataclass(frozen=True)
class DataScore:
    """Loss over the trained tokens of a data file, or of the right answers of a task. losses: what was left out of a
    file between its rows and the loss, in words."""

    name: str
    samples: int
    tokens: int
    loss: float
    perplexity: float
    truncated: int
    metric: str = "perplexity"
    metrics: dict[str, float] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)


Score = TaskScore | AnswerScore | DataScore | ClassScore


def score(
    model: Model, task: Task, *, max_length: int | None = None, allow_code_execution: bool = False, **options: Any
) -> Score:
    """The result of a task. options: batch_tokens, watch."""
    check_code(task, allow_code_execution)
    if model.classifies:
        return score_classes(model, task, max_length=max_length, **options)
    if task.spec is None or task.spec.kind == CHOICE:
        return score_task(model, task, max_length=max_length, **options)
    check_max_length(max_length, model.config, model.module)
    if task.spec.kind == LIKELIHOOD:
        return _likelihood(model, task, max_length, **options)
    spec = task.spec
    answers, cut = generate_answers(
        model,
        task.questions,
        max_new_tokens=spec.max_new_tokens,
        stop=spec.stop,
        max_length=max_length,
        **options,
    )
    worth = verdicts(task, answers)
    means = {name: sum(values) / len(values) for name, values in worth.items()}
    rows = [{name: values[i] for name, values in worth.items()} for i in range(len(answers))]
    limit = answer_limit(spec.max_new_tokens, max_length or context_length(model.config))
    shortened = limit if limit < spec.max_new_tokens else None
    return AnswerScore(task.name, len(answers), spec.metric, means, cut, answers, rows, shortened)


def value(result: Score) -> float:
    """The value of the task's main metric."""
    return result.metrics[result.metric]


def check_code(task: Task, allowed: bool) -> None:
    """Refuses to run programs that a model wrote, unless that was allowed."""
    if task.spec is not None and task.spec.program is not None and not allowed:
        raise UserError(
            f"task {task.name} runs programs that the model writes; they run confined, but it is a stranger's code: "
            "allow it with --allow-code-execution"
        )


def verdicts(task: Task, answers: Sequence[str]) -> dict[str, list[float]]:
    """The score of each answer, by metric. Programs are run here; the caller must have checked the permission."""
    assert task.spec is not None
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


def _likelihood(model: Model, task: Task, max_length: int | None, **options: Any) -> DataScore:
    encoder = Encoder(model.tokenizer, max_length or context_length(model.config))
    end_token = task.spec is not None and task.spec.end_token
    rows = [row for rows in encoder.encode(task.questions, end_token) for row in rows]
    for question, row in zip(task.questions, rows, strict=True):
        check_ids(row.input_ids, question.where, model.source, model.config)
    nll_R, count_R = score_rows(model, rows, **options)
    where = f"task {task.name}"
    return data_score(model, task.name, where, float(nll_R.sum()), int(count_R.sum()), len(rows), encoder.truncated)


def data_score(model: Model, name: str, where: str, nll: float, tokens: int, samples: int, truncated: int) -> DataScore:
    """The loss from its sum; an error if it is not finite."""
    loss = nll / tokens
    if not math.isfinite(loss):
        raise not_finite(model, f"{where}: the loss is {loss}")
    perplexity = metrics.perplexity(loss)
    return DataScore(name, samples, tokens, loss, perplexity, truncated, metrics={"perplexity": perplexity})
