"""Tasks scored by a classifier: the label with the largest logit is its answer; for a regression, the number itself.

`loss` is the mean of the training loss over questions (model/classification.py); `chance` is the accuracy of guessing.
The numbers of a regression are correlated with the task's values; for other metrics its choice is the nearest
candidate. Rows are those of training (data/tasks/classify.py); data/tasks/labels.py maps labels to classes.
"""

from dataclasses import dataclass, field
from typing import Any

from keyhole.data.capacity import check_ids, context_length
from keyhole.data.tasks.classify import TextEncoder
from keyhole.data.tasks.labels import find_labels
from keyhole.data.tasks.question import Question, Task
from keyhole.errors import UserError
from keyhole.eval import metrics
from keyhole.eval.rows import class_logits, not_finite
from keyhole.eval.scoring import metric_of
from keyhole.model.model import Model


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
    predictions: list[Any] = field(repr=False)


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
        chosen = [_nearest(number, question) for number, question in zip(said, task.questions, strict=True)]
    found = {name: metric_of(name, task.questions, chosen) for name in task.spec.metrics}
    if not labels.order:
        found["pearson"] = metrics.pearson(said, [question.number for question in task.questions])
    chance = 1 / len(labels.order) if labels.order else None
    loss = float(nll_R.sum()) / len(rows)
    return ClassScore(task.name, len(rows), task.spec.metric, found, chance, loss, encoder.truncated, said)


def _nearest(number: float, question: Question) -> int:
    return min(range(len(question.candidates)), key=lambda i: abs(float(question.candidates[i]) - number))
