"""Turns a row of a data set into a question: computes names, renders prompt and candidates, finds the right answer.

A label is compared as text (`columns.spelled`): true, "True" and 1 are spellings like `entailment`, and the task file
lists the spellings of each candidate. Any other label is refused with its row, never guessed: with 0 and 1 exchanged,
the model would learn the opposite.

Spaces at the very beginning of a prompt with candidates, from a column that begins with them, are left out, as in MeZO:
most tokenizers would make other tokens of its first word. Answers in free text keep them: they may be code.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from keyhole.data.formats import no_text
from keyhole.data.opened import Record, Row, check_text
from keyhole.data.tasks.spec import CHOICE, TaskSpec
from keyhole.data.tasks.tables import spelled
from keyhole.data.turns import Turn
from keyhole.errors import UserError, listed

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

    @property
    def number(self) -> float:
        """The target, of a question that has one."""
        assert self.value is not None
        return self.value


@dataclass(frozen=True)
class Task:
    """Questions under one name. spec: None for a file of questions with prompts and candidates."""

    name: str
    questions: list[Question]
    spec: TaskSpec | None = None
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
        raise UserError(f"{record.where}: {error}") from None


def _choice(where: str, row: Row, spec: TaskSpec) -> Question:
    found = spec.candidates if isinstance(spec.candidates, tuple) else spec.candidates.run(row)
    if not isinstance(found, tuple | list):
        raise UserError(f"candidates: expected a list of texts, found {found!r:.80}")
    if not 2 <= len(found) <= MOST_CANDIDATES:
        raise UserError(f"candidates: expected 2 to {MOST_CANDIDATES} texts, found {len(found):,}: {found!r:.80}")
    if wrong := [text for text in found if not isinstance(text, str) or not text]:
        raise UserError(f"candidates: expected texts that are not empty, found {wrong[0]!r:.60} in {found!r:.80}")
    raw = list(found)
    texts = [spec.candidate.run({**row, "candidate": text}) if spec.candidate else text for text in raw]
    _different(raw)
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
    _different(texts)
    prompt = spec.prompt.run(row).lstrip(" ")  # as in MeZO
    given = tuple(text.run(row) for text in spec.texts)
    check_text("\n".join([prompt, *texts, *given]), "the row")
    return Question(prompt, tuple(texts), right[0], where, tuple(right[1:]), value=value, texts=given)


def _different(texts: list[str]) -> None:
    if len(set(texts)) < len(texts):
        raise UserError(f"candidates: two of them are the same: {listed(texts)}")


def _label(value: object, count: int, spec: TaskSpec) -> int:
    spellings = spec.labels or tuple((str(i),) for i in range(count))
    found = [i for i, words in enumerate(spellings) if spelled(value) in words]
    if not found or found[0] >= count:
        known = "; ".join(" or ".join(words) for words in spellings)
        hint = "`labels` of the task's file lists the spellings"
        if not spec.labels:
            known = f"the number of a candidate, from 0 to {count - 1}"
            hint = 'other spellings: `labels` of the task\'s file; the text of a candidate: `right: "label"`'
        raise UserError(f"label: found {value!r:.60}, expected {known} ({hint})")
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
    """A finite number; an error otherwise."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{column}: expected a number, found {value!r:.60}")
    return number
