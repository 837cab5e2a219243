"""Turns questions into training rows, for one of two losses.

    tokens        one row per question: the prompt and the right answer, whose tokens are trained
    candidates    one row per question with all its candidates as samples; the loss compares them (model/objective.py).
                  Of several right candidates only the first is kept; the others are left out

Both use the same tokens as scoring (encode.py).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keyhole.data.dataset import IGNORED, Dataset, Sample
from keyhole.data.prepare import pad_token_id, unknown_id
from keyhole.data.report import Report
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.encode import Encoder
from keyhole.data.tasks.question import Question, Task
from keyhole.data.tasks.spec import check_loss
from keyhole.errors import UserError

TOKENS, CANDIDATES = "tokens", "candidates"


def ends(task: Task, train_end_token: bool | None) -> bool:
    """Whether the end token is trained: by the setting, else by the task file."""
    if train_end_token is not None:
        return train_end_token
    return task.spec is not None and task.spec.end_token


def training_set(tasks: Sequence[Task], tokenizer: Any, how: DataSettings, loss: str) -> Dataset:
    """All questions of the tasks; a question's source is the index of its task."""
    encoder = Encoder(tokenizer, how.max_length, how.overlong)
    samples: list[Sample] = []
    rows: list[list[int]] = []
    right, sources, where, classes, dropped, no_choice = [], [], [], [], 0, 0
    known: dict[tuple[int, str | None], int] = {}
    for source, task in enumerate(tasks):
        has_labels = len({question.candidates for question in task.questions}) == 1
        if task.spec is not None:
            check_loss(task.spec, loss)
        end = ends(task, how.train_end_token)
        for question, encoded in zip(task.questions, encoder.encode(task.questions, end), strict=True):
            kept = _kept(question, loss) if encoded else []
            dropped += not encoded
            no_choice += bool(encoded) and not kept
            if not kept:
                continue
            rows.append(list(range(len(samples), len(samples) + len(kept))))
            right.append(kept.index(question.answer))
            samples += [encoded[i] for i in kept]
            sources += [source] * len(kept)
            name = question.candidates[question.answer] if has_labels else None
            classes += [known.setdefault((source, name), len(known))] * len(kept)
            where += [question.where] * len(kept)
    if not samples:
        why = [f"{dropped:,} are longer than max_length={how.max_length}"] if dropped else []
        why += [f"of {no_choice:,} no candidate is wrong, which loss=candidates needs"] if no_choice else []
        raise UserError(f"task: no question is left to train on; {', '.join(why)}")
    data = Dataset(
        [np.array(sample.input_ids, dtype=np.int32) for sample in samples],
        [np.array(sample.labels) != IGNORED for sample in samples],
        questions=(rows, right) if loss == CANDIDATES else None,
        sources=sources,
        classes=classes,
        where=where,
        report=_report(tasks, samples, encoder, dropped, no_choice),
        end_token_ids=[tokenizer.eos_token_id] if any(ends(task, how.train_end_token) for task in tasks) else [],
        pad_token_id=pad_token_id(tokenizer),
    )
    return data


def _kept(question: Question, loss: str) -> list[int]:
    """The candidates that become samples; none if no choice is left."""
    if loss == TOKENS:
        return [question.answer]
    kept = [i for i in range(len(question.candidates)) if i not in question.also]
    return kept if len(kept) > 1 else []


def _report(tasks: Sequence[Task], samples: list[Sample], encoder: Encoder, dropped: int, no_choice: int) -> Report:
    lengths = [len(sample.input_ids) for sample in samples]
    unknown = unknown_id(encoder.tokenizer)
    cut = encoder.overlong == "truncate"
    return Report(
        read=sum(len(task.questions) for task in tasks),
        samples=len(samples),
        tokens=sum(lengths),
        trained_tokens=sum(label != IGNORED for sample in samples for label in sample.labels),
        longest=max(lengths),
        truncated=encoder.truncated if cut else 0,
        cut_prompts=encoder.truncated if cut else 0,
        dropped_overlong=dropped,
        dropped_no_choice=no_choice,
        max_length=encoder.max_length,
        unknown=sum(sample.input_ids.count(unknown) for sample in samples) if unknown is not None else 0,
    )
