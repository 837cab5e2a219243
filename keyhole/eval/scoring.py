"""Tasks scored by log-likelihood: the candidate that the model finds likeliest is its answer.

For prompt x and candidate c of n tokens, with p the model's next-token probability,

    sum(c)  = sum_t log p(c_t | x, c_<t)          mean(c) = sum(c) / n

`accuracy` chooses by the mean, as MeZO and LOMO do, since a sum favours short candidates; `accuracy_sum`
chooses by the sum. `margin` is the average over questions of mean(right) - max mean(wrong): it moves before
the accuracy does. `loss` is the NLL per token of the right candidates; `chance` the accuracy of guessing.

Rows of tokens are those of training (data/tasks/encode.py). A prompt too long for the model loses its beginning; how
many did is in the result.
"""

from dataclasses import dataclass
from typing import Any

import torch

from keyhole.data.capacity import check_ids, check_max_length, context_length
from keyhole.data.tasks.encode import Encoder
from keyhole.data.tasks.question import Question, Task
from keyhole.eval.rows import not_finite, score_rows
from keyhole.model.model import Model


@dataclass(frozen=True)
class TaskScore:
    """The result of a task; `predictions` are the candidates chosen by the mean, question by question."""

    name: str
    questions: int
    accuracy: float
    accuracy_sum: float
    chance: float
    margin: float
    loss: float
    truncated: int
    predictions: list[int]


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


def _score(task: Task, sums: list, means: list, counts: tuple, truncated: int) -> TaskScore:
    answers = [question.answer for question in task.questions]
    predictions = [int(mean.argmax()) for mean in means]
    others = [torch.cat([mean[:a], mean[a + 1 :]]).max() for mean, a in zip(means, answers, strict=True)]
    margins = [mean[a] - other for mean, a, other in zip(means, answers, others, strict=True)]
    number = len(answers)
    return TaskScore(
        name=task.name,
        questions=number,
        accuracy=sum(p == a for p, a in zip(predictions, answers, strict=True)) / number,
        accuracy_sum=sum(int(s.argmax()) == a for s, a in zip(sums, answers, strict=True)) / number,
        chance=sum(1 / len(question.candidates) for question in task.questions) / number,
        margin=float(torch.stack(margins).mean()),
        loss=-float(sum(s[a] for s, a in zip(sums, answers, strict=True)))
        / int(sum(c[a] for c, a in zip(counts, answers, strict=True))),
        truncated=truncated,
        predictions=predictions,
    )


def _check_finite(model: Model, questions: list[Question], sums: list[torch.Tensor]) -> None:
    bad = [question for question, score in zip(questions, sums, strict=True) if not score.isfinite().all()]
    if bad:
        share = f"{len(bad)} of {len(questions)} questions"
        raise not_finite(model, f"{bad[0].where}: scores that are not finite ({share})")
