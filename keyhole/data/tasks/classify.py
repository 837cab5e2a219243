"""Questions for a classifier: the task's text, or both of its texts, as one row of tokens with one label.

The tokenizer adds its special tokens to the texts: [CLS] a [SEP], or [CLS] a [SEP] b [SEP] with token types 0 and 1 if
the model has types. A row that is too long loses tokens at the end; of two texts, the longer one does. Such a row may
also be dropped or refused (`overlong`). An empty text of a tokenizer that adds no special tokens (most decoders') is
one token, bos or eos: a row of padding alone has no logits. Training and scoring use the same rows.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from keyhole.data.dataset import IGNORED, Dataset, Sample
from keyhole.data.prepare import pad_token_id
from keyhole.data.report import Report
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.encode import token_for_nothing
from keyhole.data.tasks.labels import Labels
from keyhole.data.tasks.question import Question, Task
from keyhole.errors import UserError

UNFIT = {"loss": "tokens", "packing": False, "train_end_token": None}  # settings that only language models have


def check_settings(settings: DataSettings, architecture: str) -> None:
    """Refuses settings that have no meaning for a classifier."""
    if not settings.task:
        raise UserError(
            f"train_data: {architecture} classifies texts, and labels come from a task: set task to one by name, such "
            "as sst2, or to a task file of your own (docs/tasks.md)"
        )
    for key, usual in UNFIT.items():
        if (found := getattr(settings, key)) != usual:
            raise UserError(f"{key}: {found} has no meaning for a classifier ({architecture}); leave {key} out")


class TextEncoder:
    """Turns texts of questions into rows of tokens."""

    def __init__(self, tokenizer: Any, config: Any, max_length: int | None = None, overlong: str = "truncate") -> None:
        """config: the model's, which has the number of token types and the padding id."""
        if tokenizer is None:
            raise UserError("model: the directory has no tokenizer; copy its tokenizer files in")
        self.tokenizer, self.max_length, self.overlong = tokenizer, max_length, overlong
        self.has_types = (getattr(config, "type_vocab_size", None) or 0) > 1
        own = config.pad_token_id
        self.pad_token_id = own if isinstance(own, int) and own >= 0 else pad_token_id(tokenizer)
        self.truncated = 0

    def encode(self, questions: Sequence[Question], labels: Labels) -> list[Sample | None]:
        """A row for each question; None for one that is dropped."""
        texts = [question.texts or (_prompt(question),) for question in questions]
        whole = [self._not_empty(question, *row) for question, row in zip(questions, self._tokens(texts), strict=True)]
        limit = self.max_length
        long = [] if limit is None else [i for i, (ids, _) in enumerate(whole) if len(ids) > limit]
        if long and self.overlong == "error":
            raise UserError(
                f"{questions[long[0]].where}: {len(whole[long[0]][0]):,} tokens, more than max_length={limit}; raise "
                "max_length, or set overlong to truncate or drop"
            )
        self.truncated += len(long)
        rows: list[tuple[list[int], list[int] | None] | None] = list(whole)
        cut = [None] * len(long) if self.overlong == "drop" else self._tokens([texts[i] for i in long], limit)
        for i, row in zip(long, cut, strict=True):
            rows[i] = row
        return [
            None if row is None else Sample(row[0], [IGNORED] * len(row[0]), None, row[1], labels.target(question))
            for question, row in zip(questions, rows, strict=True)
        ]

    def _not_empty(self, question: Question, ids: list[int], types: Any) -> tuple[list[int], list[int] | None]:
        """A row of at least one token, and its types."""
        if ids:
            return ids, types
        return [token_for_nothing(self.tokenizer, question)], [0] if self.has_types else None

    def _tokens(
        self, texts: Sequence[tuple[str, ...]], limit: int | None = None
    ) -> list[tuple[list[int], list[int] | None]]:
        """Ids and types of each row. All questions have the same number of texts, because they are of one task."""
        if not texts:
            return []
        columns = [list(column) for column in zip(*texts, strict=True)]
        if limit is not None and limit <= (special := self.tokenizer.num_special_tokens_to_add(len(columns) > 1)):
            raise UserError(f"max_length: {limit} leaves no room for a text beside {special} special tokens; raise it")
        how = {} if limit is None else {"truncation": True, "max_length": limit}
        made = self.tokenizer(*columns, return_token_type_ids=self.has_types, verbose=False, **how)
        if how:
            self.tokenizer("a")  # takes the limit away, which a fast tokenizer keeps and the model would save with it
        types = made["token_type_ids"] if self.has_types else [None] * len(texts)
        return list(zip(made["input_ids"], types, strict=True))


def _prompt(question: Question) -> str:
    if isinstance(question.prompt, str):
        return question.prompt
    raise UserError(f"{question.where}: the prompt is a chat; a classifier is given text")


def class_set(tasks: Sequence[Task], encoder: TextEncoder, labels: Labels) -> Dataset:
    """All questions of the tasks; a question's source is the index of its task."""
    found = [(source, q, row) for source, t in enumerate(tasks)
             for q, row in zip(t.questions, encoder.encode(t.questions, labels), strict=True)]  # fmt: skip
    kept = [(source, question, row) for source, question, row in found if row is not None]
    if not kept:
        raise UserError(f"task: no question is left to train on; all are longer than max_length={encoder.max_length}")
    rows = [row for _, _, row in kept]
    targets = [row.target for row in rows if row.target is not None]
    known: dict[tuple[int, Any], int] = {}
    classes = [known.setdefault((s, row.target if labels.order else None), len(known)) for s, _, row in kept]
    return Dataset(
        [np.array(row.input_ids, dtype=np.int32) for row in rows],
        [np.zeros(len(row.input_ids), dtype=bool) for row in rows],
        targets=targets,
        classes=classes,
        types=[row.token_type_ids or [] for row in rows] if encoder.has_types else None,
        sources=[source for source, _, _ in kept],
        where=[question.where for _, question, _ in kept],
        report=_report(rows, len(found), encoder, _counted(targets, labels)),
        pad_token_id=encoder.pad_token_id,
    )


def _counted(targets: list[Any], labels: Labels) -> str:
    if not labels.order:
        return f"{labels.names[0]} from {min(targets):g} to {max(targets):g}"
    count = Counter(targets)
    return "labels: " + ", ".join(f"{count[i]:,} {name}" for i, name in enumerate(labels.names))


def _report(rows: list[Sample], read: int, encoder: TextEncoder, labels: str) -> Report:
    lengths = [len(row.input_ids) for row in rows]
    return Report(
        read=read,
        samples=len(rows),
        tokens=sum(lengths),
        longest=max(lengths),
        truncated=encoder.truncated if encoder.overlong == "truncate" else 0,
        dropped_overlong=read - len(rows),
        max_length=encoder.max_length,
        labels=labels,
    )
