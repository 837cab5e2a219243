"""Collects rows one by one into two growing arrays: cuts, drops and counts samples.

Rows of files and of tasks come as `Encoded`: one sample, or the samples of a group (the candidates of a question).

Token ids go into an int32 array and masks into a byte array. Both grow in place, so the peak of memory is the 5 bytes
per token that are kept (and the sixteenth that a growing array has in reserve).

A sample longer than max_length is cut (`overlong: truncate`). With n = max_length, and the first answer beginning
after p tokens of prompt and ending at e:

    e <= n    the end of the sample is cut; the first answer is complete
    e > n     the prompt loses its beginning (except a leading bos), so that the answer survives. It keeps at least
              min(p, n/2) tokens; if the answer does not fit the rest, its end is cut

A plain text (`split`, and the pieces of a document always) is cut into samples of n tokens instead, so that nothing is
lost. Each begins with bos if the tokenizer has one, or else with the last token of the sample before, as context: so
every token but the first of the text is predicted once.

The share of *trained* tokens that was cut is reported. A sample without trained tokens is dropped and counted: it would
cost a forward pass and teach nothing. A data set of only such samples is an error.
"""

import hashlib
from array import array
from collections import Counter
from typing import NamedTuple

import numpy as np

from keyhole.data.dataset import Cut, Dataset, Places
from keyhole.data.formats import Example
from keyhole.data.render import Tokens
from keyhole.data.report import Report, count_names
from keyhole.data.settings import DataSettings
from keyhole.errors import UserError, listed

CUT_SHOWN = 12  # tokens of a cut that the preview can show


class Encoded(NamedTuple):
    """One row in tokens.

    samples: (ids, trained) of each. right: of the candidates of a question, the index of the right one. target, types:
    of a classifier's row. label: rows with the same one are spread evenly over an epoch."""

    samples: list[tuple[np.ndarray, np.ndarray]]
    where: str
    source: int = 0
    right: int | None = None
    target: int | float | None = None
    types: list[int] | None = None
    label: tuple[int, str | int | None] | None = None


class Collector:
    """Collects samples; `report` has the counts."""

    def __init__(self, how: DataSettings, bos: list[int], unknown_id: int | None = None) -> None:
        self.report = Report(max_length=how.max_length, train_on=how.train_on)
        self.how, self.bos, self.unknown_id = how, bos, unknown_id
        self.ids, self.trained, self.lengths = array("i"), bytearray(), array("q")
        self.where, self.source = Places(), array("i")
        self.rows: list[list[int]] = []  # of questions, with the right samples
        self.right: list[int] = []
        self.targets: list[int | float] = []
        self.types: list[list[int]] = []
        self.classes: list[int] = []
        self.cuts: dict[int, Cut] = {}
        self.ends: Counter[int] = Counter()
        self.pieces: Counter[str] = Counter()  # samples of each plain text
        self.roles: set[str] = set()
        self.seen: set[bytes] = set()
        self.chats = 0
        self._labels: dict[tuple[int, str | int | None], int] = {}

    def add(self, example: Example, tokens: Tokens) -> None:
        """Adds one example of a file: keeps, cuts, splits or drops it."""
        r, ids_T, trained_T = self.report, tokens.ids_T, tokens.trained_T
        self.chats += example.turns is not None
        self.roles |= {turn["role"] for turn in example.turns or ()}
        r.lost.update(tokens.lost.counts)
        count_names(r.lost_variables, tokens.lost.variables)
        count_names(r.lost_keys, tokens.lost.keys)
        cut, limit = None, self.how.max_length
        if limit is not None and len(ids_T) > limit:
            if self.how.overlong == "error":
                raise UserError(
                    f"{example.record.where}: {len(ids_T):,} tokens, more than max_length={limit}; "
                    "raise max_length, or set overlong to truncate, split or drop"
                )
            if self.how.overlong == "drop":
                r.dropped_overlong += 1
                return
            if self._is_split(example):
                self._split(example, tokens, limit)
                return
            ids_T, trained_T, cut = self._truncate(ids_T, trained_T, limit)
        self._add(example, ids_T, trained_T, tokens, cut)

    def _add(self, example: Example, ids_T: np.ndarray, trained_T: np.ndarray, tokens: Tokens, cut: Cut | None) -> None:
        """Adds a sample of the right length, unless it teaches nothing or is known."""
        r, record = self.report, example.record
        if not trained_T.any():
            r.dropped_untrained += 1
            return
        if self.how.dedup:
            digest = hashlib.blake2b(ids_T.tobytes() + trained_T.tobytes(), digest_size=16).digest()
            if digest in self.seen:
                r.duplicates += 1
                return
            self.seen.add(digest)
        if cut is not None:
            self.cuts[len(self.lengths)] = cut
        self.pieces[record.file] += record.is_document
        where = f"{record.file}, sample {self.pieces[record.file]}" if record.is_document else record.where
        self.keep(Encoded([(ids_T, trained_T)], where, record.source))
        self.ends.update([] if tokens.end_id is None else [tokens.end_id])
        r.unpredicted += tokens.unpredicted

    def keep(self, row: Encoded) -> None:
        """Adds a row as it is."""
        r, first = self.report, len(self.lengths)
        for ids_T, trained_T in row.samples:
            self.ids.frombytes(np.ascontiguousarray(ids_T, dtype=np.int32).tobytes())
            self.trained += np.ascontiguousarray(trained_T, dtype=bool).tobytes()
            self.lengths.append(len(ids_T))
            self.where.add(row.where)
            self.source.append(row.source)
            r.samples += 1
            r.tokens += len(ids_T)
            r.trained_tokens += int(np.count_nonzero(trained_T))
            r.unknown += int((ids_T == self.unknown_id).sum()) if self.unknown_id is not None else 0
            r.longest = max(r.longest, len(ids_T))
        if row.right is not None:
            self.rows.append(list(range(first, len(self.lengths))))
            self.right.append(row.right)
        if row.label is not None:
            self.classes += [self._labels.setdefault(row.label, len(self._labels))] * len(row.samples)
        self.targets += [] if row.target is None else [row.target]
        self.types += [] if row.types is None else [row.types]

    def _is_split(self, example: Example) -> bool:
        """Whether a sample that is too long becomes several; refused where the parts would have lost their context."""
        if self.how.overlong == "split" and (example.turns is not None or example.prompt):
            raise UserError(
                f"{example.record.where}: longer than max_length={self.how.max_length}, and overlong=split is for "
                "plain text; the second part of an answer would be without its question: set overlong to truncate, "
                "drop or error"
            )
        return self.how.overlong == "split" or example.record.is_document

    def _split(self, example: Example, tokens: Tokens, n: int) -> None:
        """Adds the sample as several of at most n tokens."""
        head = len(self.bos) if self.bos and tokens.ids_T[: len(self.bos)].tolist() == self.bos else 0
        if head >= n:
            raise UserError(f"max_length={n}: no more than the {head} tokens that begin a text; raise it")
        ids_T, trained_T = tokens.ids_T[head:], tokens.trained_T[head:]
        self.report.split += 1
        for start in range(0, max(1, len(ids_T) - (not head)), n - head if head else n - 1):
            part = slice(start, start + n - head)
            own, mask = np.r_[tokens.ids_T[:head], ids_T[part]], np.r_[tokens.trained_T[:head], trained_T[part]]
            mask[0] = False
            self.report.windows += 1
            self._add(example, own, mask, tokens, None)

    def _truncate(self, ids_T: np.ndarray, trained_T: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, Cut]:
        """At most n tokens, with as much of the first answer as possible."""
        first = int(trained_T.argmax()) if trained_T.any() else 0
        stops = np.flatnonzero(~trained_T[first:])
        end = first + int(stops[0]) if len(stops) else len(ids_T)
        head = len(self.bos) if self.bos and ids_T[: len(self.bos)].tolist() == self.bos else 0
        prompt, before = first - head, 0
        if end > n and prompt > 0 and trained_T.any():
            before = prompt - max(min(prompt, n // 2), min(prompt, n - head - (end - first)))
            keep = np.r_[0:head, head + before : len(ids_T)]
            ids_T, trained_T = ids_T[keep], trained_T[keep]
        tail = ids_T[n:]
        cut = Cut(len(tail), int(trained_T[n:].sum()), tail[:CUT_SHOWN].tolist(), before)
        self.report.truncated += 1
        self.report.cut_prompts += before > 0
        self.report.cut_trained_tokens += cut.trained
        return ids_T[:n], trained_T[:n], cut

    def dataset(self, pad_token_id: int, chat_template: str | None = None) -> Dataset:
        """The samples, one per row; an error if there are none."""
        if not self.lengths:
            raise UserError(self.nothing_left())
        return Dataset(
            np.frombuffer(self.ids, dtype=np.int32),
            np.frombuffer(self.trained, dtype=bool),
            lengths=self.lengths,
            questions=(self.rows, self.right) if self.rows else None,
            targets=self.targets or None,
            types=self.types or None,
            classes=self.classes or None,
            report=self.report,
            where=self.where,
            sources=self.source,
            cuts=self.cuts,
            end_token_ids=[i for i, _ in self.ends.most_common()],  # special tokens that end answers
            pad_token_id=pad_token_id,
            chat_template=chat_template,
        )

    def nothing_left(self) -> str:
        r = self.report
        lines = [f"no sample is left to train on ({r.read:,} rows read, train_on={r.train_on})"]
        if r.dropped_overlong:
            lines.append(f"  {r.dropped_overlong:,} are longer than max_length={r.max_length}: raise it")
        if r.dropped_no_choice:
            lines.append(f"  of {r.dropped_no_choice:,} no candidate is wrong, which loss=candidates needs")
        if r.lost["calls"]:
            lines.append(f"  {r.lost['calls']:,} answers are tool calls that the chat template does not write")
        if r.dropped_untrained:
            lines.append(
                f"  {r.dropped_untrained:,} have no trained token: no answer (roles found: "
                f"{listed(sorted(self.roles)) or 'none'}), an empty one, or one that begins after "
                f"max_length={r.max_length}"
            )
        return "\n".join(lines)
