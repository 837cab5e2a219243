"""Collects rows one by one into growing arrays: cuts, drops and counts samples; then mixes and packs them.

Rows of files come as tokens, rows of tasks as `Encoded`: one sample, or the samples of a group (the candidates of a
question). Token ids go into an int32 array and masks into a byte array, so the peak of memory is the 5 bytes per token
that are kept (and the sixteenth that a growing array has in reserve).

A sample longer than max_length is cut (`overlong: truncate`). With n = max_length, and the first answer beginning
after p tokens of prompt and ending at e:

    e <= n    the end of the sample is cut; the first answer is complete
    e > n     the prompt loses its beginning (except a leading bos), so that the answer survives. It keeps at least
              min(p, n/2) tokens; if the answer does not fit the rest, its end is cut

A plain text (`split`, and the pieces of a document always) is cut into samples of n tokens instead, so that nothing is
lost. Each begins with bos if the tokenizer has one, or else with the last token of the sample before, as context: so
every token but the first of the text is predicted once.

`train_weights` mixes several sources: 2 gives every sample of a source two rows per epoch, 0.5 every second sample one
row (the seed decides which). Rows refer to samples, so a repeated sample costs no memory.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keyhole.data.batches import order
from keyhole.data.dataset import IGNORED, Cut, Dataset, Sample
from keyhole.data.examples import Example
from keyhole.data.report import Report
from keyhole.data.settings import DataSettings
from keyhole.data.tokens import Tokens
from keyhole.errors import UserError, listed
from keyhole.model.rows import pack

LEAST_MIXED, MOST_GROWTH = 2**20, 16  # rows per epoch that weights may make: always, and per sample


Fitting = tuple[np.ndarray, np.ndarray, Cut | None]  # a sample that is short enough, and what was cut


class Encoded(NamedTuple):
    """One row in tokens. right: of the candidates of a question, the index of the right one. label: rows with the same
    one are spread evenly over an epoch."""

    samples: list[Sample]
    where: str
    source: int = 0
    right: int | None = None
    label: tuple[int, str | int | None] | None = None


class Collector:
    def __init__(self, how: DataSettings, bos: list[int], unknown_id: int | None = None) -> None:
        self.report = Report(max_length=how.max_length, train_on=how.train_on)
        self.how, self.bos, self.unknown_id = how, bos, unknown_id
        self.ids, self.trained, self.lengths = array("i"), bytearray(), array("q")
        self.where, self.source = list[str](), array("i")
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
        """Adds one example of a file, as one sample or several, unless it teaches nothing or is known."""
        r, record = self.report, example.record
        self.chats += example.turns is not None
        self.roles |= {turn["role"] for turn in example.turns or ()}
        r.lost.update(tokens.lost)
        for ids_T, trained_T, cut in self._fitting(example, tokens.ids_T, tokens.trained_T):
            digest = hashlib.blake2b(ids_T.tobytes() + trained_T.tobytes(), digest_size=16).digest()
            if not trained_T.any():
                r.dropped_untrained += 1
            elif self.how.dedup and digest in self.seen:
                r.duplicates += 1
            else:
                self.seen |= {digest} if self.how.dedup else set()
                self.cuts |= {} if cut is None else {len(self.lengths): cut}
                self.pieces[record.file] += record.is_document
                where = f"{record.file}, sample {self.pieces[record.file]}" if record.is_document else record.where
                self._keep(ids_T, trained_T, where, record.source)
                self.ends.update([] if tokens.end_id is None else [tokens.end_id])

    def _fitting(self, example: Example, ids_T: np.ndarray, trained_T: np.ndarray) -> list[Fitting]:
        """The samples of at most max_length tokens that an example becomes."""
        where, limit, how, count = example.record.where, self.how.max_length, self.how.overlong, len(ids_T)
        if limit is None or count <= limit:
            return [(ids_T, trained_T, None)]
        if how == "error":
            raise UserError(
                f"{where}: {count:,} tokens, more than max_length={limit}; raise max_length, or set overlong to "
                "truncate, split or drop"
            )
        if how == "split" and (example.turns is not None or example.prompt):
            raise UserError(
                f"{where}: longer than max_length={limit}, and overlong=split is for plain text; the second part of "
                "an answer would be without its question: set overlong to truncate, drop or error"
            )
        if how == "drop":
            self.report.dropped_overlong += 1
            return []
        head = len(self.bos) if self.bos and ids_T[: len(self.bos)].tolist() == self.bos else 0
        if how == "split" or example.record.is_document:
            return self._split(ids_T, trained_T, head, limit)
        return [self._truncated(ids_T, trained_T, head, limit)]

    def _keep(self, ids_T: np.ndarray, trained_T: np.ndarray, where: str, source: int) -> None:
        r = self.report
        self.ids.frombytes(ids_T.tobytes())
        self.trained += trained_T.tobytes()
        self.lengths.append(len(ids_T))
        self.where.append(where)
        self.source.append(source)
        r.samples += 1
        r.tokens += len(ids_T)
        r.trained_tokens += int(np.count_nonzero(trained_T))
        r.unknown += int((ids_T == self.unknown_id).sum()) if self.unknown_id is not None else 0
        r.longest = max(r.longest, len(ids_T))

    def keep(self, row: Encoded) -> None:
        """Adds a row of a task as it is."""
        first = len(self.lengths)
        for sample in row.samples:
            self._keep(
                np.array(sample.input_ids, dtype=np.int32), np.array(sample.labels) != IGNORED, row.where, row.source
            )
            self.targets += [] if sample.target is None else [sample.target]
            self.types += [] if sample.token_type_ids is None else [sample.token_type_ids]
        if row.right is not None:
            self.rows.append(list(range(first, len(self.lengths))))
            self.right.append(row.right)
        if row.label is not None:
            self.classes += [self._labels.setdefault(row.label, len(self._labels))] * len(row.samples)

    def _split(self, ids_T: np.ndarray, trained_T: np.ndarray, head: int, n: int) -> list[Fitting]:
        """A text as several samples of at most n tokens, each with the bos of `head` tokens that begins the text."""
        if head >= n:
            raise UserError(f"max_length={n}: no more than the {head} tokens that begin a text; raise it")
        self.report.split += 1
        found: list[Fitting] = []
        for start in range(head, max(head + 1, len(ids_T) - (not head)), n - head if head else n - 1):
            part = np.r_[0:head, start : min(len(ids_T), start + n - head)]
            found.append((ids_T[part], trained_T[part], None))
            found[-1][1][0] = False
        return found

    def _truncated(self, ids_T: np.ndarray, trained_T: np.ndarray, head: int, n: int) -> Fitting:
        """At most n tokens, with as much of the first answer as possible. head: tokens of the bos that stays."""
        first = int(trained_T.argmax()) if trained_T.any() else 0
        stops = np.flatnonzero(~trained_T[first:])
        end = first + int(stops[0]) if len(stops) else len(ids_T)
        prompt, before = first - head, 0
        if end > n and prompt > 0 and trained_T.any():
            before = prompt - max(min(prompt, n // 2), min(prompt, n - head - (end - first)))
            keep = np.r_[0:head, head + before : len(ids_T)]
            ids_T, trained_T = ids_T[keep], trained_T[keep]
        cut = Cut(len(ids_T[n:]), int(trained_T[n:].sum()), before)
        self.report.truncated += 1
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
        r, roles = self.report, listed(sorted(self.roles)) or "none"
        told = [
            (r.dropped_overlong, f"are longer than max_length={r.max_length}: raise it"),
            (r.dropped_no_choice, "are questions of which no candidate is wrong, which loss=candidates needs"),
            (r.lost["calls"], "are answers that call tools, which the chat template does not write"),
            (
                r.dropped_untrained,
                f"have no trained token: no answer (roles found: {roles}), an empty one, or one that begins after "
                f"max_length={r.max_length}",
            ),
        ]
        lines = [f"no sample is left to train on ({r.read:,} rows read, train_on={r.train_on})"]
        return "\n".join(lines + [f"  {count:,} {what}" for count, what in told if count])


def arrange(data: Dataset, how: DataSettings, sources: int) -> Dataset:
    """The data set with its rows: samples mixed by weight, then packed. sources: of files, or tasks."""
    weights = how.train_weights
    if weights is not None and len(weights) != sources:
        kind = "tasks" if how.task else "sources"
        raise UserError(f"train_weights: {len(weights)} numbers for {sources} {kind}; give one for each")
    if weights is not None:
        data.choose(_mixed(data, weights, how.seed))
    if how.packing:
        assert how.max_length is not None  # DataSettings refuses packing without it
        members = [row[0] for row in data.rows]
        rows = pack([data.lengths[i] for i in members], how.max_length)
        data.rows, data.packed = [[members[k] for k in row] for row in rows], True
    if not data.rows:
        raise UserError("train_weights: no sample is left; give a source a weight above 0")
    data.report.packed, data.report.rows = how.packing, len(data.rows)
    return data


def _mixed(data: Dataset, weights: Sequence[float], seed: int) -> list[int]:
    """Rows in the order of their sources, each as often as the weight of its source requires."""
    sources = np.array([data.sources[row[0]] for row in data.rows])
    chosen: list[int] = []
    told: list[str] = []
    total, most = sum(weights[row] for row in sources.tolist()), max(LEAST_MIXED, MOST_GROWTH * len(sources))
    if total > most:
        raise UserError(
            f"train_weights: {total:,.0f} rows per epoch of {len(sources):,} samples; at most {most:,}: give smaller "
            "weights, and more num_train_epochs"
        )
    for source, weight in enumerate(weights):
        own = np.flatnonzero(sources == source)
        whole, part = divmod(weight, 1)
        some = np.sort(order(len(own), seed, source)[: round(part * len(own))])
        rows = own.tolist() * int(whole) + own[some].tolist()
        chosen += rows
        told.append(f"{len(rows):,} of source {source + 1} (weight {weight:g})")
    data.report.mixture = "rows per epoch: " + ", ".join(told)
    return chosen
