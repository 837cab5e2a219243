"""The labels of a classifier, and which of them belongs to which class of a task.

    names    the names of a task's classes: as spelled in the data (`labels` of the task file: negative, positive), or
             else the candidates; a task with a `value` is a regression with one name, its column
    order    the model's label of each class. By name, if the model's config has names that the task knows (a
             published model of MNLI may begin with contradiction); by number, if it has none (LABEL_0, LABEL_1) or
             a new head was requested, which then gets the task's names

Anything else is refused: a wrong order would train, or score, the opposite.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.data.tasks.question import Question
from keyhole.data.tasks.spec import TaskSpec
from keyhole.errors import UserError, listed
from keyhole.model.classification import MULTI_LABEL, REGRESSION, problem_of


@dataclass(frozen=True)
class Labels:
    """names: in the model's order. order: the model's label of each class of the task; none for a regression."""

    names: tuple[str, ...]
    order: tuple[int, ...] = ()

    def target(self, question: Question) -> int | float | None:
        """What the model should answer: a label, or the value of a regression."""
        return self.order[question.answer] if self.order else question.value


def class_names(spec: TaskSpec, num_labels: int | None = None, head_asked: bool = True) -> tuple[str, ...]:
    """The names of a task's labels. num_labels: as set, or as the model has it if no head was asked for; None: as the
    task has it."""
    if spec.value is not None and num_labels in (None, 1):
        return (spec.value,)
    if not isinstance(spec.candidates, tuple) or not spec.candidates:
        why = "its candidates differ from row to row" if spec.candidates else "its answers are free text"
        raise UserError(f"task {spec.name}: {why}; a classifier has no labels for it, use a decoder without head")
    if num_labels not in (None, len(spec.candidates)):
        theirs = f"task {spec.name} has {len(spec.candidates)} labels"
        if head_asked:
            raise UserError(f"num_labels: {num_labels}, but {theirs}; set num_labels=null")
        raise UserError(
            f"model: its head is for {num_labels} labels (num_labels of its config), but {theirs}; choose another "
            "model; to train, head=classification draws a new head"
        )
    spellings = [[word for word in words if not word.lstrip("-").isdecimal()] for words in spec.labels]
    spellings = spellings or [[] for _ in spec.candidates]
    names = [words[0] if words else text.strip() for words, text in zip(spellings, spec.candidates, strict=True)]
    if len({name.lower() for name in names}) < len(names):
        raise UserError(
            f"task {spec.name}: two of its labels have one name ({listed(names)}), whatever the case; a classifier "
            "knows labels by name: give them different words in `labels` of the task file"
        )
    return tuple(names)


def find_labels(specs: Sequence[TaskSpec], config: Any, head_asked: bool = False) -> Labels:
    """The labels of a classifier for these tasks, which must have the same labels. config: the model's."""
    names = class_names(specs[0], config.num_labels, head_asked)
    for other in specs[1:]:
        count = None if other.value is None else config.num_labels  # without a value, the task's own number
        if (found := class_names(other, count, head_asked)) != names:
            raise UserError(
                f"task: {specs[0].name} has the labels {listed(names)}, {other.name} has {listed(found)}; a classifier "
                "has one list of labels: train on one of them"
            )
    problem = problem_of(config)
    if problem == MULTI_LABEL or (problem == REGRESSION and config.num_labels > 1):
        raise UserError(
            f"model: its config says problem_type={problem} with {config.num_labels} labels; a row of a task has one: "
            "remove problem_type from config.json"
        )
    if problem == REGRESSION:
        return Labels(names)
    own = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    if (order := _by_name(specs[0], names, own)) is not None:
        return Labels(own, order)
    if head_asked or own == tuple(f"LABEL_{i}" for i in range(len(own))):
        return Labels(names, tuple(range(len(names))))
    raise UserError(
        f"model: its labels are {listed(own)} (id2label of its config), those of task {specs[0].name} are "
        f"{listed(names)}; which is which? Rename the model's in config.json; to train, head=classification does so"
    )


def _by_name(spec: TaskSpec, names: tuple[str, ...], own: tuple[str, ...]) -> tuple[int, ...] | None:
    """The index of each class among the model's labels; None if one is missing, or two are the same."""
    assert isinstance(spec.candidates, tuple)
    known = [{name.lower(), text.strip().lower()} for name, text in zip(names, spec.candidates, strict=True)]
    known = [words | set(spec.labels[i] if spec.labels else ()) for i, words in enumerate(known)]
    places = [[i for i, name in enumerate(own) if name.strip().lower() in words] for words in known]
    found = tuple(place[0] for place in places if len(place) == 1)
    return found if len(set(found)) == len(own) else None
