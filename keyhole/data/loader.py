"""Batches in an order that is a pure function of (seed, epoch); the position in it is two integers.

    step = the next batch_size * gradient_accumulation_steps rows of the order (epoch.py), cut into micro-batches

Nothing is random besides, so resuming is exact: {"epoch": e, "offset": o} determines which rows have been used, and the
next step is the one that would have followed. The offset counts rows, not steps, so batch sizes may change across a
resume.

An epoch ends with the end of a step: its last step takes the remaining rows, with fewer or smaller micro-batches, as a
plain PyTorch loop without drop_last does. So an epoch is steps_per_epoch whole steps in which every row is used exactly
once. The loss of a step is a mean over *its* tokens, so a short step is weighted correctly.

Micro-batches are padded on the right, to one of a few widths (epoch.py), with attention_mask 0 and label -100 there.
Packed batches have no attention mask: their padding is one more sample at the end of the row, with positions from 0,
which has no labels and which no other sample attends to.

If rows are questions, a batch has all their candidates as rows, question by question, and two more tensors [rows]:
`question` (0, 0, 1, 1, ...) and `answer` (1 for the right candidate). batch_size counts questions. Rows of a classifier
have one number each in `labels` [rows], and token_type_ids if the model has them.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from keyhole.data.dataset import IGNORED, Dataset, Sample
from keyhole.data.epoch import Padding, order, stratified_order
from keyhole.data.settings import BEFORE
from keyhole.errors import UserError

Batch = dict[str, torch.Tensor]


def collate(
    samples: list[Sample], pad_token_id: int, pad_to_multiple_of: int = BEFORE, pad_to_most: int | None = None
) -> Batch:
    """Rows of different lengths as one batch of int64 tensors [B, T] on the CPU; for a classifier, labels are [B]."""
    length_B, first = np.array([len(s.input_ids) for s in samples], dtype=np.int64), samples[0]

    def flat(rows: Iterable[list[int] | None]) -> np.ndarray:
        tokens: np.ndarray = np.fromiter(chain.from_iterable(filter(None, rows)), np.int64, int(length_B.sum()))
        return tokens

    return _padded(
        length_B,
        Padding(pad_to_multiple_of, pad_to_most),
        pad_token_id,
        flat(s.input_ids for s in samples),
        flat(s.labels for s in samples) if first.target is None else [s.target for s in samples],
        None if first.token_type_ids is None else flat(s.token_type_ids for s in samples),
        None if first.position_ids is None else flat(s.position_ids for s in samples),
    )


def make_batch(dataset: Dataset, rows: list[int], padding: Padding) -> Batch:
    """The rows of a data set as one batch, without a list per sample."""
    chosen = [dataset.rows[i] for i in rows]
    members = chosen if dataset.right is None else [[i] for row in chosen for i in row]  # the samples of each row
    sample_S = np.fromiter(chain.from_iterable(members), np.int64)
    length_S = dataset.starts[sample_S + 1] - dataset.starts[sample_S]
    first_B = np.cumsum([0] + [len(row) for row in members[:-1]])
    within_M = np.arange(int(length_S.sum())) - np.repeat(np.cumsum(length_S) - length_S, length_S)
    at_M = np.repeat(dataset.starts[sample_S], length_S) + within_M
    ids_M, targets = dataset.ids[at_M], dataset.targets
    batch = _padded(
        np.add.reduceat(length_S, first_B),
        padding,
        dataset.pad_token_id,
        ids_M,
        np.where(dataset.trained[at_M], ids_M, IGNORED) if targets is None else [targets[row[0]] for row in members],
        dataset.types[at_M] if targets is not None and dataset.types is not None else None,
        within_M if dataset.packed else None,
    )
    if dataset.right is not None:
        size_Q = np.array([len(row) for row in chosen])
        right = np.cumsum(size_Q) - size_Q + np.array([dataset.right[i] for i in rows])
        batch["question"] = torch.from_numpy(np.repeat(np.arange(len(rows)), size_Q))
        batch["answer"] = torch.zeros(len(members), dtype=torch.int64).index_fill_(0, torch.from_numpy(right), 1)
    return batch


def _padded(
    length_B: np.ndarray,
    padding: Padding,
    pad_token_id: int,
    ids_M: np.ndarray,
    labels: np.ndarray | list[int | float | None],
    types_M: np.ndarray | None,
    positions_M: np.ndarray | None,
) -> Batch:
    """A batch from the tokens of all rows, one row behind the other: all are placed at once. labels: of tokens, or a
    list with one for each row. positions_M: of packed rows, which have no mask."""
    width = padding.width(int(length_B.max()))
    after_BT = np.arange(width) - length_B[:, None]  # of padding: 0, 1, 2, ...
    real_BT = after_BT < 0

    def placed(x_M: np.ndarray, fill: int | np.ndarray) -> torch.Tensor:
        rows_BT = np.empty(real_BT.shape, dtype=np.int64)
        rows_BT[:] = fill
        rows_BT[real_BT] = x_M
        return torch.from_numpy(rows_BT)

    batch = {"input_ids": placed(ids_M, pad_token_id)}
    batch["labels"] = torch.tensor(labels) if isinstance(labels, list) else placed(labels, IGNORED)
    if types_M is not None:
        batch["token_type_ids"] = placed(types_M, 0)
    if positions_M is None:
        batch["attention_mask"] = torch.from_numpy(real_BT.astype(np.int64))
    else:
        batch["position_ids"] = placed(positions_M, after_BT)
    return batch


class Loader:
    """An endless iterator of steps, each a list of micro-batches."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        gradient_accumulation_steps: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        pad_to_multiple_of: int = BEFORE,
        pad_to_most: int | None = None,
        about: dict[str, Any] | None = None,
        stratified: bool = False,
    ) -> None:
        """stratified: each step has the classes of the whole data set (epoch.py). about: further facts about the data
        that a resumed run needs; kept in the state."""
        assert len(dataset) > 0 and batch_size > 0 and gradient_accumulation_steps > 0
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.rows_per_step = batch_size * gradient_accumulation_steps
        self.padding = Padding(pad_to_multiple_of, pad_to_most)
        self.stratified, self._classes = stratified, dataset.row_classes() if stratified else None
        self.fingerprint, self.about = dataset.fingerprint, about or {}
        self._epoch, self._offset = 0, 0
        self._order: tuple[int, np.ndarray] | None = None
        self._last: list[int] = []

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.dataset) // self.rows_per_step)

    @property
    def epoch(self) -> float:
        """Passes over the data so far: 1.5 is halfway through the second."""
        return self._epoch + self._offset / len(self.dataset)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, offset in rows) of the next step."""
        return self._epoch, self._offset

    def order_of(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, in the order in which they are used."""
        if self._classes is None:
            return order(len(self.dataset), self.seed, epoch, self.shuffle)
        return stratified_order(self._classes, self.seed, epoch, self.shuffle)

    def next_step(self) -> list[Mapping[str, torch.Tensor]]:
        """The micro-batches of the next step."""
        if self._order is None or self._order[0] != self._epoch:
            self._order = (self._epoch, self.order_of(self._epoch))
        rows = self._order[1][self._offset : self._offset + self.rows_per_step].tolist()
        self._last = rows
        self._offset += len(rows)
        if self._offset == len(self.dataset):
            self._epoch, self._offset = self._epoch + 1, 0
        return [self._batch(rows[i : i + self.batch_size]) for i in range(0, len(rows), self.batch_size)]

    def coming(self, count: int, tokens: int) -> list[Batch]:
        """The rows of the coming steps, at most `count` and none twice, in batches of at most so many tokens with their
        padding, or of batch_size rows; the position stays."""
        rows: list[int] = []
        wanted, epoch, offset = min(count, len(self.dataset)), self._epoch, self._offset
        while len(rows) < wanted:
            order_N = self._order[1] if self._order and self._order[0] == epoch else self.order_of(epoch)
            later_N = order_N[offset:]
            rows += (later_N[~np.isin(later_N, rows)] if rows else later_N)[: wanted - len(rows)].tolist()
            epoch, offset = epoch + 1, 0
        return [self._batch(part) for part in self._parts(rows, tokens)]

    def _parts(self, rows: list[int], tokens: int) -> Iterator[list[int]]:
        """These rows, in order, in parts of batch_size rows, or of as many more as have so many tokens."""
        part: list[int] = []
        longest = samples = 0
        for row in rows:
            length, count = self.dataset.row_length(row), self.dataset.row_samples(row)
            full = (samples + count) * self.padding.width(max(longest, length)) > tokens
            if full and len(part) >= self.batch_size:
                yield part
                part, longest, samples = [], 0, 0
            part.append(row)
            longest, samples = max(longest, length), samples + count
        yield part

    def _batch(self, rows: list[int]) -> Batch:
        return make_batch(self.dataset, rows, self.padding)

    __next__ = next_step

    def __iter__(self) -> "Loader":
        return self

    def where(self, most: int = 4) -> str:
        """Where the samples of the last step came from, for error messages."""
        samples = [i for row in self._last for i in self.dataset.rows[row]]
        names = samples if self.dataset.right is None else [self.dataset.rows[row][0] for row in self._last]
        shown = "; ".join(self.dataset.where[i] for i in names[:most])
        return shown + (f"; and {len(names) - most} more" if len(names) > most else "")

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; plain JSON."""
        return {
            "epoch": self._epoch, "offset": self._offset, "seed": self.seed, "shuffle": self.shuffle,
            "rows": len(self.dataset), "fingerprint": self.fingerprint, "stratified": self.stratified, **self.about,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the exact row; refuses data that differ from those of the saved state."""
        if state["fingerprint"] != self.fingerprint:
            raise UserError(
                f"resume: the training data are not those of the checkpoint ({state['rows']:,} rows then, "
                f"{len(self.dataset):,} now, or other tokens); restore train_data or task, the "
                "tokenizer, chat_template and the settings of the data, or start anew in another output_dir"
            )
        for key, now in (("seed", self.seed), ("shuffle", self.shuffle), ("stratified", self.stratified)):
            if (before := state.get(key, False)) != now:
                raise UserError(f"resume: {key}={now}, but the checkpoint's is {before}; set it back")
        self._epoch, self._offset, self._last = int(state["epoch"]), int(state["offset"]), []


class EvalBatches:
    """The batches of a data set in order, iterable any number of times; empty (and false) without a data set."""

    def __init__(
        self, dataset: Dataset | None, batch_size: int, pad_to_multiple_of: int = BEFORE, pad_to_most: int | None = None
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.padding = Padding(pad_to_multiple_of, pad_to_most)

    def __len__(self) -> int:
        return 0 if self.dataset is None else -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        if self.dataset is None:
            return
        for i in range(len(self)):
            stop = min(len(self.dataset), (i + 1) * self.batch_size)
            rows = [self.dataset[j] for j in range(i * self.batch_size, stop)]
            yield collate(rows, self.dataset.pad_token_id, *self.padding)
