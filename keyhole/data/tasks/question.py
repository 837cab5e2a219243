"""Turns a row of a data set into a question: computes names, renders prompt and candidates, finds the right answer.

A label is compared as text (`columns.spelled`): true, "True" and 1 are spellings like `entailment`, and the task file
lists the spellings of each candidate. Any other label is refused with its row, never guessed: with 0 and 1 exchanged,
the model would learn the opposite.

Spaces at the very beginning of a prompt with candidates, from a column that begins with them, are left out, as in MeZO:
most tokenizers would make other tokens of its first word. Answers in free text keep them: they may be code.

The labels of a classifier, and which of them belongs to which class of a task:

names    the names of a task's classes: as spelled in the data (`labels` of the task file: negative, positive), or
             else the candidates; a task with a `value` is a regression with one name, its column
    order    the model's label of each class. By name, if the model's config has names that the task knows (a
             published model of MNLI may begin with contradiction); by number, if it has none (LABEL_0, LABEL_1) or
             a new head was requested, which then gets the task's names
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keyhole.data.examples import no_text
from keyhole.data.opened import Record, Row, check_text
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.spec import CHOICE, TaskSpec, Text
from keyhole.data.tasks.tables import spelled
from keyhole.data.turns import Turn
from keyhole.errors import UserError, listed
from keyhole.model.structure.config_files import MULTI_LABEL, REGRESSION, problem_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


MOST_CANDIDATES = 1000
MARK = "\N{SYMBOL FOR SUBSTITUTE}completion\N{SYMBOL FOR SUBSTITUTE}"  # the place of the model's text in a program
Turns = list[Turn]


@dataclass(frozen=True)
class Question:
    """The prompt, the candidates, the right answer, and the place in the file."""

    prompt: str | Turns
    candidates: tuple[str, ...]  # a single one: an answer in free text, which is generated or only trained on
    answer: int  # index of the right candidate
    where: str = "question"
    also: tuple[int, ...] = ()  # further candidates that are right
    references: tuple[str, ...] = ()  # right answers in free text; for a program, the program that checks it
    value: float | None = None  # the target of a regression
    texts: tuple[str, ...] = ()  # input of a classifier, if that is not the prompt

    @classmethod
    def read_back(cls, told: dict[str, Any]) -> "Question":
        """The question of an entry of the cache, which has lists for tuples."""
        made: dict[str, Any] = {k: tuple(v) if type(v) is list and k != "prompt" else v for k, v in told.items()}
        return cls(**made)


@dataclass(frozen=True)
class Task:
    name: str
    questions: list[Question]
    spec: TaskSpec
    about: str = ""  # where the questions come from, in one line
    warnings: tuple[str, ...] = ()  # possible problems

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with any question, and with their order."""
        digest = hashlib.blake2b(digest_size=8)
        for q in self.questions:
            parts = [q.prompt, q.candidates, q.answer, q.also, q.references, q.value, *q.texts]
            digest.update(json.dumps(parts, ensure_ascii=True).encode() + b"\n")
        return digest.hexdigest()


def build(record: Record, spec: TaskSpec) -> Question | None:
    """The question of a row with the task's columns; None if its answer is empty."""
    try:
        row = dict(record.row)
        for name, expression in spec.let.items():
            row[name] = expression.run(row)
        return _choice(record.where, row, spec) if spec.kind == CHOICE else _free(record.where, row, spec)
    except UserError as error:
        empty = [" or ".join(aliases) for name, aliases in spec.columns.items() if record.row[name] is None]
        lacks = f"; the row has nothing in {listed(empty)}; its columns are {listed(record.columns)}"
        raise UserError(f"{record.where}: {error}{lacks if record.columns else ''}") from None


def _choice(where: str, row: Row, spec: TaskSpec) -> Question:
    found = spec.candidates if isinstance(spec.candidates, tuple) else spec.candidates.run(row)
    if not isinstance(found, tuple | list) or not 2 <= len(found) <= MOST_CANDIDATES:
        raise UserError(f"candidates: expected a list of 2 to {MOST_CANDIDATES} texts, found {found!r:.80}")
    if wrong := [text for text in found if not isinstance(text, str) or not text]:
        raise UserError(f"candidates: expected texts that are not empty, found {wrong[0]!r:.60} in {found!r:.80}")
    raw = list(found)
    texts = [spec.candidate.run({**row, "candidate": text}) if spec.candidate else text for text in raw]
    value = None if spec.value is None else number_of(row[spec.value], spec.value)
    if spec.right is not None:
        named = spec.right.run(row)
        named = named if isinstance(named, list) else [named]
        right = list(dict.fromkeys(raw.index(text) for text in named if text in raw))
        if not right:
            raise UserError(f"right: none of {listed(named)} is one of the candidates {listed(raw)}")
    elif spec.has_label or value is None:
        right = [_label(row["label"], len(raw), spec)]
    else:
        nearest = [abs(number_of(text, "candidates") - value) for text in texts]
        right = [nearest.index(min(nearest))]
    if len(set(texts)) < len(texts):
        raise UserError(f"candidates: two of them are the same: {listed(texts)}")
    prompt = spec.prompt.run(row)
    if type(spec.prompt) is Text:
        prompt = prompt.lstrip(" ")  # as in MeZO
    turns = prompt if isinstance(prompt, list) and prompt else [None]
    if not isinstance(prompt, str) and not all(isinstance(t, dict) and {"role", "content"} <= t.keys() for t in turns):
        raise UserError(f"prompt: expected text or turns {{role, content}}, found {prompt!r:.60}")
    given = tuple(text.run(row) for text in spec.texts)
    check_text("\n".join([json.dumps(prompt, ensure_ascii=False, default=str), *texts, *given]), "the row")
    return Question(prompt, tuple(texts), right[0], where, tuple(right[1:]), value=value, texts=given)


def _label(value: object, count: int, spec: TaskSpec) -> int:
    spellings = spec.labels or tuple((str(i),) for i in range(count))
    found = [i for i, words in enumerate(spellings) if spelled(value) in words]
    if not found or found[0] >= count:
        known, hint = (
            "; ".join(" or ".join(words) for words in spellings),
            "`labels` of the task's file lists the spellings",
        )
        if not spec.labels:
            known = f"the number of a candidate, from 0 to {count - 1}"
            hint = 'other spellings: `labels` of the task\'s file; the text of a candidate: `right: "label"`'
        raise UserError(f"label: found {'nothing' if value is None else repr(value):.60}, expected {known} ({hint})")
    return found[0]


def _free(where: str, row: Row, spec: TaskSpec) -> Question | None:
    assert spec.answer is not None  # as its kind says
    prompt, answer = spec.prompt.run(row), spec.answer.run(row)
    check_text(f"{prompt}\n{answer}", "the row")
    if not answer.strip():
        return None
    references = [answer.strip()] if spec.references is None else spec.references.run(row)
    references = references if isinstance(references, list) else [references]
    if spec.program is not None:
        references = [spec.program.run({**row, "completion": MARK})]
    if wrong := [text for text in references if no_text(text)]:
        raise UserError(f"references: found {wrong[0]!r:.60}, expected texts")
    if not references:
        raise UserError("references: the list is empty; there is no right answer")
    return Question(prompt, (answer,), 0, where, references=tuple(map(str, references)))


def number_of(value: Any, column: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{column}: expected a number, found {value!r:.60}")
    return number


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


def find_labels(specs: Sequence[TaskSpec], config: "PreTrainedConfig", head_asked: bool = False) -> Labels:
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


def check_settings(settings: DataSettings, architecture: str) -> None:
    if not settings.task:
        raise UserError(
            f"train_data: {architecture} classifies texts, and labels come from a task: set task to one by name, such "
            "as sst2, or to a task file of your own (docs/tasks.md)"
        )
    fit = {"loss": "tokens", "packing": False, "train_end_token": None}  # the others are for language models
    for key, usual in fit.items():
        if (found := vars(settings)[key]) != usual:
            raise UserError(f"{key}: {found} has no meaning for a classifier ({architecture}); leave {key} out")
