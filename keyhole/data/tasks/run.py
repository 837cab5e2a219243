"""The tasks of a run: what it trains on, what chooses the model, what judges it, and a report of the draw."""

from dataclasses import dataclass, replace
from typing import Any

from keyhole.data.capacity import check_data
from keyhole.data.dataset import Dataset
from keyhole.data.prepare import arrange
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.dataset import CANDIDATES, TOKENS, training_set
from keyhole.data.tasks.draw import Numbers, load_task
from keyhole.data.tasks.question import Task
from keyhole.errors import UserError


@dataclass(frozen=True)
class TaskData:
    """Rows to train on, rows for the validation loss, and the questions of dev and test, task by task."""

    train: Dataset
    held_out: Dataset
    drawn: tuple[Task, ...]  # the questions of `train`, unless some were too long
    dev: tuple[Task, ...]
    test: tuple[Task, ...]
    report: list[str]


def load_tasks(settings: DataSettings, tokenizer: Any, known: Any) -> TaskData:
    """Everything about the tasks of a run. known: the HF config of the model that takes them."""
    names = [settings.task] if isinstance(settings.task, str) else list(settings.task or ())
    if len(set(names)) < len(names):
        raise UserError(f"task: {', '.join(names)}: one of them is named twice; train_weights repeats a task's rows")
    weights = settings.train_weights
    if weights is not None and len(weights) != len(names):
        raise UserError(f"train_weights: {len(weights)} numbers for {len(names)} tasks; give one for each")
    numbers = Numbers(train=settings.num_train, dev=settings.num_dev, test=settings.num_eval, seed=settings.seed)
    drawn = [load_task(name, settings.task_data, numbers, settings.task_splits) for name in names]
    train, dev, test = (tuple(each[split] for each in drawn) for split in ("train", "dev", "test"))
    dev = tuple(task for task in dev if task.questions)
    data = arrange(training_set(train, tokenizer, settings, settings.loss), settings, weights, settings.seed)
    report = [line for each in drawn for line in _lines(each)]
    report += [*data.report.lines(), *check_data(data, settings.model, known)]
    if settings.loss == CANDIDATES:
        report.append(f"loss: candidates; {len(data.lengths):,} candidates of {len(data):,} questions")
    held_out = training_set(dev or test, tokenizer, replace(settings, overlong="truncate"), TOKENS)
    check_data(held_out, settings.model, known)
    return TaskData(data, held_out, train, dev, test, report)


def load_test_tasks(settings: DataSettings) -> tuple[Task, ...]:
    """The tasks that only judge (test_task)."""
    names = [settings.test_task] if isinstance(settings.test_task, str) else list(settings.test_task or ())
    numbers = Numbers(test=settings.num_eval, seed=settings.seed)
    how = {"training": False}
    return tuple(load_task(name, settings.task_data, numbers, settings.task_splits, **how)["test"] for name in names)


def _lines(drawn: dict[str, Task]) -> list[str]:
    spec = drawn["train"].spec
    parts = [f"{split} {task.about} ({task.fingerprint})" for split, task in drawn.items() if task.questions]
    return [f"task {spec.name}: {spec.title}; {spec.metric}", *(f"task {spec.name}: {part}" for part in parts)]
