"""Tasks scored by a classifier: the label with the largest logit is its answer; of a regression, the number itself.

`loss` is the mean over questions of what the model is trained by (model/classification.py); `chance` the accuracy of
guessing. A regression has one metric, Pearson's correlation with the task's values. Rows are those of training
(data/tasks/classify.py); which label is which class: data/tasks/labels.py.
"""

from dataclasses import dataclass, field
from typing import Any

from keyhole.data.capacity import check_ids, context_length
from keyhole.data.tasks.classify import TextEncoder
from keyhole.data.tasks.labels import find_labels
from keyhole.data.tasks.question import Task
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
    rows = encoder.encode(task.questions, labels)
    for question, row in zip(task.questions, rows, strict=True):
        check_ids(row.input_ids, question.where, model.source, model.config)
    logits_RL, nll_R = class_logits(model, rows, encoder.pad_token_id, **options)
    if bad := (~logits_RL.isfinite()).any(dim=1).nonzero()[:, 0].tolist():
        share = f"{len(bad)} of {len(rows)} questions"
        raise not_finite(model, f"{task.questions[bad[0]].where}: logits that are not finite ({share})")
    if labels.order:
        chosen = [labels.order.index(label) for label in logits_RL.argmax(dim=1).tolist()]
        found = {name: metric_of(name, task.questions, chosen) for name in task.spec.metrics}
        chance = 1 / len(labels.names)
    else:
        chosen, chance = logits_RL[:, 0].tolist(), None
        found = {"pearson": metrics.pearson(chosen, [question.value for question in task.questions])}
    loss = float(nll_R.sum()) / len(rows)
    metric = next(iter(found))
    return ClassScore(task.name, len(rows), metric, found, chance, loss, encoder.truncated, chosen)
