"""Samples in memory, ready to be batched: 5 bytes per token.

All token ids lie in one int32 array and all masks in one bool array, with the start of every sample beside
them; lists of Python ints would take 40 bytes per token. A *row* is what the model is given at once: one
sample, or several samples packed into max_length tokens (packing.py). Rows are made when they are asked
for:

    row.input_ids      the ids of its samples, one after another
    row.labels         the id where trained, -100 elsewhere and at the first token of every sample, so that
                       nothing is predicted from one sample into the next
    row.position_ids   0, 1, 2, ... from the beginning of every sample (packed rows only)

`fingerprint` is a hash of everything a batch is made of. A resumed run compares it, because going on at
"sample 512" means nothing in other data.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

IGNORED = -100


class Sample(NamedTuple):
    """One row. `position_ids` is None unless rows are packed."""

    input_ids: list[int]
    labels: list[int]
    position_ids: list[int] | None = None


class Cut(NamedTuple):
    """What truncation took from the end of a sample."""

    tokens: int
    trained: int
    first_ids: list[int]  # of what was cut, for the preview


@dataclass
class Report:
    """What was read and what became of it; `lines()` is for people."""

    formats: dict[str, str] = field(default_factory=dict)  # file -> why it is read the way it is
    read: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    truncated: int = 0
    cut_trained_tokens: int = 0
    dropped_overlong: int = 0
    dropped_untrained: int = 0
    straddling: int = 0
    rows: int = 0
    max_length: int | None = None
    packed: bool = False
    template: str = ""
    train_on: str = "answers"

    def lines(self) -> list[str]:
        """The counts in a few lines; what did not happen is not mentioned."""
        files = list(self.formats.items())
        out = [f"{name}: {why}" for name, why in files[:5]]
        out += [f"... and {len(files) - 5} more files"] if len(files) > 5 else []
        out += [f"template: {self.template}"] if self.template else []
        share = _percent(self.trained_tokens, self.tokens)
        out.append(
            f"{self.samples:,} samples of {self.read:,} rows read, "
            f"{self.tokens:,} tokens (longest sample {self.longest:,}), "
            f"{self.trained_tokens:,} trained on ({share}, train_on={self.train_on})"
        )
        return out + self._losses()

    def _losses(self) -> list[str]:
        out = []
        if self.truncated:
            whole = self.trained_tokens + self.cut_trained_tokens
            out.append(
                f"truncated to max_length={self.max_length}: {self.truncated:,} samples, "
                f"{_percent(self.cut_trained_tokens, whole)} of the trained tokens cut "
                f"({self.cut_trained_tokens:,})"
            )
        if self.dropped_overlong:
            out.append(f"dropped: {self.dropped_overlong:,} samples longer than max_length={self.max_length}")
        if self.dropped_untrained:
            out.append(f"dropped: {self.dropped_untrained:,} samples with nothing to train on")
        if self.straddling:
            out.append(f"{self.straddling:,} samples have a token across prompt and answer; it counts as answer")
        if self.packed:
            fill = _percent(self.tokens, self.rows * (self.max_length or 1))
            out.append(f"packed into {self.rows:,} rows of {self.max_length} tokens, {fill} filled")
        return out


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f}%"


class Dataset(Sequence[Sample]):
    """A sequence of rows. Iteration, len() and indexing are over rows; `samples` counts what is inside."""

    def __init__(
        self, ids: list[np.ndarray], trained: list[np.ndarray], *, rows: list[list[int]] | None = None,
        report: Report | None = None, where: list[str] | None = None, cuts: dict[int, Cut] | None = None,
        end_token_ids: Sequence[int] = (), pad_token_id: int = 0,
    ) -> None:  # fmt: skip
        lengths = np.array([len(x) for x in ids], dtype=np.int64)
        self.lengths: list[int] = lengths.tolist()
        self.starts = np.concatenate(([0], np.cumsum(lengths)))
        self.ids = np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, dtype=np.int32)
        self.trained = np.concatenate(trained).astype(bool) if trained else np.zeros(0, dtype=bool)
        self.trained[self.starts[:-1]] = False
        self.packed = rows is not None
        self.rows = rows if rows is not None else [[i] for i in range(len(ids))]
        self.report = report or Report()
        self.where = where or [f"sample {i + 1}" for i in range(len(ids))]
        self.cuts = cuts or {}
        self.end_token_ids, self.pad_token_id = list(end_token_ids), pad_token_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        parts = [slice(self.starts[i], self.starts[i + 1]) for i in self.rows[index]]
        ids = [token for part in parts for token in self.ids[part].tolist()]
        trained = [flag for part in parts for flag in self.trained[part].tolist()]
        labels = [token if flag else IGNORED for token, flag in zip(ids, trained, strict=True)]
        positions = [t for i in self.rows[index] for t in range(self.lengths[i])] if self.packed else None
        return Sample(ids, labels, positions)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def row_length(self, index: int) -> int:
        """Tokens in a row, without making it."""
        return sum(self.lengths[i] for i in self.rows[index])

    @property
    def fingerprint(self) -> str:
        """32 hex digits that change with any token, mask, boundary or row, and with packing."""
        digest = hashlib.blake2b(bytes([self.packed]), digest_size=16)
        rows = np.array([i for row in self.rows for i in (*row, -1)], dtype=np.int64)
        for array in (self.starts, self.ids, self.trained, rows):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()
