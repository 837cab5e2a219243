"""The tasks of a run: questions for training, for selection (dev) and for scoring (test), and a report of the draw."""

from dataclasses import dataclass, replace
from typing import Any

from keyhole.data.capacity import check_data
from keyhole.data.dataset import Dataset
from keyhole.data.prepare import arrange
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.classify import TextEncoder, class_set
from keyhole.data.tasks.dataset import CANDIDATES, TOKENS, training_set
from keyhole.data.tasks.draw import Numbers, load_task
from keyhole.data.tasks.labels import Labels, find_labels
from keyhole.data.tasks.names import check_names, listed_names
from keyhole.data.tasks.question import Task
from keyhole.errors import UserError
from keyhole.model.structure.skeleton import is_classifier


@dataclass(frozen=True)
class TaskData:
    """Rows to train on, rows for the validation loss, and the questions of dev and test, task by task."""

    train: Dataset
    held_out: Dataset | None  # dev; None without dev
    drawn: tuple[Task, ...]  # the questions of `train`, unless some were too long
    dev: tuple[Task, ...]
    test: tuple[Task, ...]
    report: list[str]
    labels: tuple[str, ...] = ()  # names of a classifier's labels


def load_tasks(settings: DataSettings, tokenizer: Any, known: Any) -> TaskData:
    """Loads the tasks of a run. known: the HF config of the model."""
    names = listed_names(settings.task)
    check_names([*names, *listed_names(settings.test_task)], settings.task_splits)
    weights = settings.train_weights
    if weights is not None and len(weights) != len(names):
        raise UserError(f"train_weights: {len(weights)} numbers for {len(names)} tasks; give one for each")
    numbers = Numbers(train=settings.num_train, dev=settings.num_dev, test=settings.num_eval, seed=settings.seed)
    where = settings.task_data, numbers, settings.task_splits
    drawn = [load_task(name, *where, cache=settings.data_cache) for name in names]
    train, dev, test = (tuple(each[split] for each in drawn) for split in ("train", "dev", "test"))
    dev = tuple(task for task in dev if task.questions)
    labels = None
    if is_classifier(known):
        labels = find_labels([task.spec for task in train if task.spec is not None], known, settings.head is not None)
    rows = _rows(train, tokenizer, settings, settings.loss, labels, known)
    data = arrange(rows, settings, weights, settings.seed)
    report = [line for each in drawn for line in _lines(each)]
    report += [*data.report.lines(), *check_data(data, settings.model, known)]
    if settings.loss == CANDIDATES:
        report.append(f"loss: candidates; {len(data.lengths):,} candidates of {len(data):,} questions")
    held_out = None  # without dev there is no selection; test never selects
    if dev:
        held_out = _rows(dev, tokenizer, replace(settings, overlong="truncate"), TOKENS, labels, known)
        check_data(held_out, settings.model, known)
    return TaskData(data, held_out, train, dev, test, report, () if labels is None else labels.names)


def _rows(
    tasks: tuple[Task, ...], tokenizer: Any, how: DataSettings, loss: str, labels: Labels | None, known: Any
) -> Dataset:
    """The questions as training rows; for a classifier, if there are labels."""
    if labels is None:
        return training_set(tasks, tokenizer, how, loss)
    return class_set(tasks, TextEncoder(tokenizer, known, how.max_length, how.overlong), labels)


def load_test_tasks(settings: DataSettings) -> tuple[Task, ...]:
    """The tasks that are only scored (test_task)."""
    names = listed_names(settings.test_task)
    if names:
        check_names([*listed_names(settings.task), *names], settings.task_splits)
    numbers = Numbers(test=settings.num_eval, seed=settings.seed)
    how: dict[str, Any] = {"training": False, "cache": settings.data_cache}
    return tuple(load_task(name, settings.task_data, numbers, settings.task_splits, **how)["test"] for name in names)


def _lines(drawn: dict[str, Task]) -> list[str]:
    spec = drawn["train"].spec
    assert spec is not None
    parts = [f"{split} {task.about} ({task.fingerprint})" for split, task in drawn.items() if task.questions]
    return [f"task {spec.name}: {spec.title}; {spec.metric}", *(f"task {spec.name}: {part}" for part in parts),
            *(line for task in drawn.values() for line in warning_lines(task))]  # fmt: skip


def warning_lines(task: Task) -> list[str]:
    """Warnings about the questions of a task, for its report."""
    return [f"warning: task {task.name}: {told}" for told in task.warnings]
