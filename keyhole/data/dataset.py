"""Samples in memory, ready to be batched: 5 bytes per token.

All token ids are in one int32 array and all masks in one bool array, with the start of every sample beside them; lists
of Python ints would take 40 bytes per token. A *row* is one row of a batch: one sample, or several samples packed into
max_length tokens (model/rows.py). Rows are built on access (`Sample`).

A data set for a *classifier* has a number per sample (a label, or the value of a regression), no trained tokens, and
token types if the model has them (1 byte per token). A data set of *questions* has one row per question, with one
sample per candidate, of which one is right. The loader reads the samples of such a row; read as a single sample, the
row is its right candidate.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keyhole.data.report import Report

IGNORED = -100


class Sample(NamedTuple):
    """One row: its ids, and its labels, which are the ids where they are trained and IGNORED elsewhere and at the first
    token of every sample, so that nothing is predicted from one sample into the next. position_ids: of packed rows.
    target: of a classifier."""

    input_ids: list[int]
    labels: list[int]
    position_ids: list[int] | None = None
    token_type_ids: list[int] | None = None
    target: int | float | None = None


class Cut(NamedTuple):
    """What truncation removed from a sample: at its end, and at the beginning of its prompt."""

    tokens: int = 0
    trained: int = 0
    before: int = 0  # tokens cut from the prompt


class Dataset(Sequence[Sample]):
    """A sequence of rows. Iteration, len() and indexing are over rows."""

    def __init__(
        self,
        ids: Sequence[np.ndarray] | np.ndarray,
        trained: Sequence[np.ndarray] | np.ndarray,
        *,
        lengths: Sequence[int] | None = None,
        rows: list[list[int]] | None = None,
        questions: tuple[list[list[int]], list[int]] | None = None,
        targets: Sequence[int | float] | None = None,
        types: Sequence[list[int]] | None = None,
        classes: Sequence[int] | None = None,
        sources: Sequence[int] = (),
        report: Report | None = None,
        where: Sequence[str] | None = None,
        cuts: dict[int, Cut] | None = None,
        end_token_ids: Sequence[int] = (),
        pad_token_id: int = 0,
        chat_template: str | None = None,
    ) -> None:
        """ids and trained: an array per sample, or one array of all samples with their lengths. rows: the samples of
        each packed row; None: one sample per row. questions: the samples of each question, and which of them is right.
        targets, types: one per sample, for a classifier. classes: one per sample, from 0 (batches.py). sources: the
        source of each sample. chat_template: the template of the chats, if it is not the tokenizer's."""
        if lengths is None:
            lengths = [len(x) for x in ids]
            ids = np.concatenate([*ids, np.zeros(0, dtype=np.int32)]).astype(np.int32)
            trained = np.concatenate([*trained, np.zeros(0, dtype=bool)]).astype(bool)
        assert isinstance(ids, np.ndarray) and isinstance(trained, np.ndarray)
        self.lengths, self.ids, self.trained = list(lengths), ids, trained
        self.starts = np.concatenate(([0], np.cumsum(np.array(self.lengths, dtype=np.int64))))
        self.trained[self.starts[:-1]] = False
        self.packed, self.right = rows is not None, None if questions is None else questions[1]
        self.rows = rows or ([[i] for i in range(len(self.lengths))] if questions is None else questions[0])
        self.targets = None if targets is None else list(targets)
        self.types = None if types is None else np.array([kind for row in types for kind in row], dtype=np.uint8)
        self.classes, self.sources = classes, sources
        self.report = report or Report()
        self.where = where or [f"sample {i + 1}" for i in range(len(self.lengths))]
        self.cuts = cuts or {}
        self.end_token_ids, self.pad_token_id, self.chat_template = list(end_token_ids), pad_token_id, chat_template

    @classmethod
    def of(cls, samples: Sequence[Sample], pad_token_id: int) -> "Dataset":
        return cls(
            [np.array(sample.input_ids, dtype=np.int32) for sample in samples],
            [np.array(sample.labels) != IGNORED for sample in samples],
            targets=[s.target for s in samples if s.target is not None] or None,
            types=[s.token_type_ids for s in samples if s.token_type_ids is not None] or None,
            pad_token_id=pad_token_id,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # no slices
        samples = self.rows[index] if self.right is None else [self.rows[index][self.right[index]]]
        parts = [slice(self.starts[i], self.starts[i + 1]) for i in samples]
        ids = [token for part in parts for token in self.ids[part].tolist()]
        trained = [flag for part in parts for flag in self.trained[part].tolist()]
        return Sample(
            ids,
            [token if flag else IGNORED for token, flag in zip(ids, trained, strict=True)],
            [t for i in samples for t in range(self.lengths[i])] if self.packed else None,
            None if self.types is None else self.types[parts[0]].tolist(),
            None if self.targets is None else self.targets[samples[0]],
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def row_length(self, index: int) -> int:
        """Tokens in a row, without building it: of a question, those of its longest candidate."""
        lengths = [self.lengths[i] for i in self.rows[index]]
        return sum(lengths) if self.packed else max(lengths)

    def longest_row(self) -> int:
        return max(map(self.row_length, range(len(self)))) if self.packed else max(self.lengths)

    def row_samples(self, index: int) -> int:
        """How many rows of a batch a row is: one for each candidate of a question."""
        return 1 if self.packed else len(self.rows[index])

    def most_samples(self, rows: int) -> int:
        """The largest number of rows of a batch that this many rows can be."""
        return sum(sorted(map(self.row_samples, range(len(self))), reverse=True)[:rows])

    def row_classes(self) -> np.ndarray | None:
        """The class of each row; None if there is only one, or if a row may have samples of several."""
        if self.packed or self.classes is None:
            return None
        found = np.array([self.classes[row[0]] for row in self.rows], dtype=np.int64)
        return found if len(np.unique(found)) > 1 else None

    def choose(self, rows: list[int]) -> None:
        """Keeps these rows, in this order; a row may occur several times."""
        self.right = None if self.right is None else [self.right[i] for i in rows]
        self.rows = [self.rows[i] for i in rows]

    @property
    def fingerprint(self) -> str:
        """32 hex digits that change with any token, type, mask, boundary, row, label or right answer, and packing: a
        position such as "sample 512" is meaningless in other data."""
        digest = hashlib.blake2b(bytes([self.packed]), digest_size=16)
        rows = np.array([i for row in self.rows for i in (*row, -1)], dtype=np.int64)
        right = [] if self.right is None else [np.array(self.right, dtype=np.int64)]
        kinds = [np.array(part) for part in (self.targets, self.types) if part is not None]
        for part in (self.starts, self.ids, self.trained, rows, *right, *kinds):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()
