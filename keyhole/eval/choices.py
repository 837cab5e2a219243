"""Tasks that offer candidates: the most likely one is the model's answer, or the label that a classifier chooses.

For prompt x and candidate c of n tokens, with p the model's next-token probability,

    sum(c)  = sum_t log p(c_t | x, c_<t)          mean(c) = sum(c) / n

`accuracy` chooses by the mean, as MeZO and LOMO do, since a sum favours short candidates; `accuracy_sum` chooses by the
sum. `margin` is the average over questions of mean(right) - max mean(wrong): it changes before the accuracy does.
`loss` is the NLL per token of the right candidates; `chance` the accuracy of guessing.

A classifier answers with the label of its largest logit, a regression with its number: those numbers are correlated
with the task's values, and for other metrics the nearest candidate is its choice. Its `loss` is the mean training loss.

Rows are those of training (data/tasks). A prompt that is too long for the model loses its beginning; the result has
the number of such prompts.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.data.capacity import check_ids, check_max_length, context_length
from keyhole.data.tasks.encode import Encoder, TextEncoder
from keyhole.data.tasks.question import Question, Task, find_labels
from keyhole.errors import UserError
from keyhole.eval import metrics
from keyhole.eval.rows import class_logits, not_finite, score_rows
from keyhole.model.model import Model


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
    sums, counts = [-nll for nll in nll_R.split(sizes)], count_R.split(sizes)
    means = [score / count for score, count in zip(sums, counts, strict=True)]
    if bad := [q for q, score in zip(task.questions, sums, strict=True) if not score.isfinite().all()]:
        share = f"{len(bad)} of {len(task.questions)} questions"
        raise not_finite(model, f"{bad[0].where}: scores that are not finite ({share})")
    answers, number = [question.answer for question in task.questions], len(task.questions)
    rights = [{question.answer, *question.also} for question in task.questions]
    predictions = [int(mean.argmax()) for mean in means]
    margins = [
        max(m for i, m in enumerate(mean) if i in right)
        - max((m for i, m in enumerate(mean) if i not in right), default=mean.min())
        for mean, right in zip(means, rights, strict=True)
    ]
    names = ("accuracy",) if task.spec is None else task.spec.metrics
    return TaskScore(
        name=task.name,
        questions=number,
        accuracy=metric_of("accuracy", task.questions, predictions),
        accuracy_sum=metric_of("accuracy", task.questions, [int(score.argmax()) for score in sums]),
        chance=sum(len(right) / len(q.candidates) for right, q in zip(rights, task.questions, strict=True)) / number,
        margin=float(torch.stack(margins).mean()),
        loss=-float(sum(score[a] for score, a in zip(sums, answers, strict=True)))
        / int(sum(count[a] for count, a in zip(counts, answers, strict=True))),
        truncated=encoder.truncated,
        predictions=predictions,
        metric=names[0],
        metrics={name: metric_of(name, task.questions, predictions) for name in names},
    )


def metric_of(name: str, questions: list[Question], predictions: list[int]) -> float:
    """A metric of choices. If several candidates are right and one of them is chosen, it counts as the right one."""
    if name == "pearson":
        chosen = [float(q.candidates[p]) for q, p in zip(questions, predictions, strict=True)]
        return metrics.pearson(chosen, [q.number for q in questions])
    right = [p if p in q.also else q.answer for q, p in zip(questions, predictions, strict=True)]
    return metrics.OF_CHOICES[name](predictions, right)


@dataclass(frozen=True)
class ClassScore:
    """The result of a task; `predictions` are classes of the task, or the numbers of a regression."""

    name: str
    questions: int
    metric: str
    metrics: dict[str, float]
    chance: float | None
    loss: float
    truncated: int
    predictions: list[int] | list[float] = field(repr=False)


def score_classes(model: Model, task: Task, *, max_length: int | None = None, **options: Any) -> ClassScore:
    """Classifies all questions. options: batch_tokens, passes, watch (rows.py)."""
    if task.spec is None:
        raise UserError(
            f"{task.name}: {type(model.module).__name__} classifies texts, and is scored by tasks by name (sst2) or by "
            "task files (my.yaml), which name the labels"
        )
    labels = find_labels([task.spec], model.config)
    longest = min(filter(None, (max_length, context_length(model.config))), default=None)
    encoder = TextEncoder(model.tokenizer, model.config, longest)
    rows = [row for row in encoder.encode(task.questions, labels) if row is not None]  # it cuts, and drops none
    for question, row in zip(task.questions, rows, strict=True):
        check_ids(row.input_ids, question.where, model.source, model.config)
    logits_RL, nll_R = class_logits(model, rows, encoder.pad_token_id, **options)
    if bad := (~logits_RL.isfinite()).any(dim=1).nonzero()[:, 0].tolist():
        share = f"{len(bad)} of {len(rows)} questions"
        raise not_finite(model, f"{task.questions[bad[0]].where}: logits that are not finite ({share})")
    if labels.order:
        said = chosen = [labels.order.index(label) for label in logits_RL.argmax(dim=1).tolist()]
    else:
        said = logits_RL[:, 0].tolist()
        chosen = [
            min(range(len(question.candidates)), key=lambda i: abs(float(question.candidates[i]) - number))
            for number, question in zip(said, task.questions, strict=True)
        ]
    found = {name: metric_of(name, task.questions, chosen) for name in task.spec.metrics}
    if not labels.order:
        found["pearson"] = metrics.pearson(said, [question.number for question in task.questions])
    chance = 1 / len(labels.order) if labels.order else None
    loss = float(nll_R.sum()) / len(rows)
    return ClassScore(task.name, len(rows), task.spec.metric, found, chance, loss, encoder.truncated, said)
