"""Tasks scored by log-likelihood: the most likely candidate is the model's answer.

For prompt x and candidate c of n tokens, with p the model's next-token probability,

    sum(c)  = sum_t log p(c_t | x, c_<t)          mean(c) = sum(c) / n

`accuracy` chooses by the mean, as MeZO and LOMO do, since a sum favours short candidates; `accuracy_sum`
chooses by the sum. `margin` is the average over questions of mean(right) - max mean(wrong): it changes
before the accuracy does. `loss` is the NLL per token of the right candidates; `chance` the accuracy of guessing.

Rows of tokens are those of training (data/tasks/encode.py). A prompt that is too long for the model loses its
beginning; the result has the number of such prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.data.capacity import check_ids, check_max_length, context_length
from keyhole.data.tasks.encode import Encoder
from keyhole.data.tasks.question import Question, Task
from keyhole.eval import metrics
from keyhole.eval.rows import not_finite, score_rows
from keyhole.model.model import Model

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class TaskScore:
    """The result of a task; `predictions` are the candidates chosen by the mean, question by question. metric: the
    main one of `metrics`."""

    name: str
    questions: int
    accuracy: float
    accuracy_sum: float
    chance: float
    margin: float
    loss: float
    truncated: int
    predictions: list[int]
    metric: str = "accuracy"
    metrics: dict[str, float] = field(default_factory=dict)


def score_task(model: Model, task: Task, *, max_length: int | None = None, **options: Any) -> TaskScore:
    """Scores all candidates of all questions. options: batch_tokens, passes, watch (rows.py)."""
    check_max_length(max_length, model.config, model.module)
    encoder = Encoder(model.tokenizer, max_length or context_length(model.config))
    rows_by_question = encoder.encode(task.questions)
    for question, rows in zip(task.questions, rows_by_question, strict=True):
        check_ids([i for row in rows for i in row.input_ids], question.where, model.source, model.config)
    nll_R, count_R = score_rows(model, [row for rows in rows_by_question for row in rows], **options)
    sizes = [len(rows) for rows in rows_by_question]
    sums = [-nll for nll in nll_R.split(sizes)]
    means = [-nll / count for nll, count in zip(nll_R.split(sizes), count_R.split(sizes), strict=True)]
    _check_finite(model, task.questions, sums)
    return _score(task, sums, means, count_R.split(sizes), encoder.truncated)


def _score(task: Task, sums: Tensors, means: Tensors, counts: Tensors, truncated: int) -> TaskScore:
    answers = [question.answer for question in task.questions]
    rights = [{question.answer, *question.also} for question in task.questions]
    predictions = [int(mean.argmax()) for mean in means]
    margins = [
        max(m for i, m in enumerate(mean) if i in right)
        - max((m for i, m in enumerate(mean) if i not in right), default=mean.min())
        for mean, right in zip(means, rights, strict=True)
    ]
    number = len(answers)
    names = ("accuracy",) if task.spec is None else task.spec.metrics
    values = {name: metric_of(name, task.questions, predictions) for name in names}
    return TaskScore(
        name=task.name,
        questions=number,
        accuracy=metric_of("accuracy", task.questions, predictions),
        accuracy_sum=metric_of("accuracy", task.questions, [int(s.argmax()) for s in sums]),
        chance=sum(len(right) / len(q.candidates) for right, q in zip(rights, task.questions, strict=True)) / number,
        margin=float(torch.stack(margins).mean()),
        loss=-float(sum(s[a] for s, a in zip(sums, answers, strict=True)))
        / int(sum(c[a] for c, a in zip(counts, answers, strict=True))),
        truncated=truncated,
        predictions=predictions,
        metric=names[0],
        metrics=values,
    )


def metric_of(name: str, questions: list[Question], predictions: list[int]) -> float:
    """A metric of choices. If several candidates are right and one of them is chosen, it counts as the right one."""
    if name == "pearson":
        chosen = [float(q.candidates[p]) for q, p in zip(questions, predictions, strict=True)]
        return metrics.pearson(chosen, [q.number for q in questions])
    right = [p if p in q.also else q.answer for q, p in zip(questions, predictions, strict=True)]
    return metrics.OF_CHOICES[name](predictions, right)


def _check_finite(model: Model, questions: list[Question], sums: list[torch.Tensor]) -> None:
    bad = [question for question, score in zip(questions, sums, strict=True) if not score.isfinite().all()]
    if bad:
        share = f"{len(bad)} of {len(questions)} questions"
        raise not_finite(model, f"{bad[0].where}: scores that are not finite ({share})")
