"""A question and its answers, independent of its data set."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from keyhole.data.tasks.spec import TaskSpec

Turns = list[dict[str, Any]]


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
