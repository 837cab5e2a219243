"""Batches in an order that is a pure function of (seed, epoch), padded to a few widths; the position in it is two
integers.

    order(seed, e)     row indices sorted by splitmix64(seed, e, index)             no generator, no state
    step               the next batch_size * gradient_accumulation_steps rows of it, cut into micro-batches

So {"epoch": e, "offset": o} determines which rows have been used, and resuming is exact. The offset counts rows, not
steps, so batch sizes may change across a resume. An epoch ends with the end of a step: its last step takes the rows
that are left, as a plain PyTorch loop without drop_last does; a loss is a mean over the tokens of *its* step.

**Classes.** A small batch that happens to have too many rows of one label has a gradient that points towards this label
for every input. That part of the gradient is noise: it averages to zero over batches. It matters most for zeroth-order
steps, which move *every* weight by (g . z) z_i, so that every weight's noise has the size of the whole batch gradient:

    E ((g . z) z_i)^2  =  |g|^2 + 2 g_i^2                 g: gradient of the batch, z ~ N(0, 1)

So (setting `stratify`; auto: if there are classes) with n_c of N rows in class c, the k-th row of a class in the
shuffled order gets the place (k + u_c) / n_c, where u_c in [0, 1) depends on (seed, epoch, c); the epoch is sorted by
place. In a batch of B rows each of C classes then has

    | rows of c  -  B n_c / N |  <  1 + C n_c / N                    two equal classes, B = 16: 8 and 8

**Widths.** Every new shape of a batch costs time: kernels are selected, memory is allocated, and CUDA graphs are
captured again. So rows are padded on the right, a little further than to the longest (setting `pad_to_multiple_of`):

    auto       at most 1024 tokens in the longest row L:  multiples of max(8, L / 8 rounded up to a multiple of 8),
               the last one cut to L rounded up to 8: at most 8 widths; longer rows, and packed ones: multiples of 8
    a number   multiples of it; of 1 if the longest row would be padded beyond the model's last position
    null       the longest row of the batch

Padding is masked, has no label, and follows the tokens, so it changes results only by rounding. Packed batches have no
mask: their padding is one more sample at the end of the row, with positions from 0. If rows are questions, a batch has
all their candidates as rows, question by question, and two more tensors [rows]: `question` (0, 0, 1, 1, ...) and
`answer` (1 for the right candidate). Rows of a classifier have one number each in `labels` [rows].
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from keyhole.data.dataset import IGNORED, Dataset, Sample
from keyhole.data.examples import AUTO
from keyhole.errors import UserError, as_user_error

LONG, WIDTHS, STEP = 1024, 8, 8

Batch = dict[str, torch.Tensor]


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Row indices of an epoch. The same on every machine and every version of every library."""
    key = _splitmix64(np.uint64(seed % 2**64)) ^ _splitmix64(~np.uint64(epoch))
    order_N: np.ndarray = np.argsort(_splitmix64(_splitmix64(np.arange(count, dtype=np.uint64) ^ key)), kind="stable")
    return order_N


def stratified_order(class_N: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Row indices of an epoch in which the rows of each class are spread evenly."""
    order_N, classes = order(len(class_N), seed, epoch), int(class_N.max()) + 1
    key = _splitmix64(~np.uint64(seed % 2**64)) ^ _splitmix64(np.uint64(epoch))
    offset_C = np.minimum(_splitmix64(np.arange(classes, dtype=np.uint64) ^ key) / 2.0**64, 1 - 2.0**-53)
    ordered_N, place_N = class_N[order_N], np.empty(len(order_N))
    for c, offset in enumerate(offset_C):
        own = np.flatnonzero(ordered_N == c)
        place_N[own] = (np.arange(len(own)) + offset) / max(1, len(own))
    stratified_N: np.ndarray = order_N[np.argsort(place_N, kind="stable")]
    return stratified_N


def _splitmix64(x: np.ndarray | np.uint64) -> np.ndarray:
    """A bijection of 64-bit integers that scatters them (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        z: np.ndarray = np.asarray(x, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        return z


def stratifies(data: Dataset, asked: bool | str) -> bool:
    """Whether batches are stratified; refuses a wish that cannot be fulfilled."""
    found = data.row_classes() is not None
    if asked is True and not found:
        raise UserError(
            "stratify: true needs rows with labels (a task whose questions have the same candidates, or several "
            "tasks), without packing; leave stratify out"
        )
    return found if asked == AUTO else bool(asked)


class Padding(NamedTuple):
    """Batches have a multiple of `multiple` tokens per row, but no more than `most` (None: no limit)."""

    multiple: int = STEP
    most: int | None = None

    def width(self, longest: int) -> int:
        """Tokens per row of a batch whose longest row has `longest` tokens."""
        width = _rounded(longest, self.multiple)
        return width if self.most is None else max(longest, min(width, self.most))


USUAL = Padding()


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def choose_padding(
    data: Dataset, asked: int | str | None, positions: int | None, multiple: int | None = None
) -> Padding:
    """The padding of a data set. positions: the last position of the model, if its config has one. multiple: that of
    the training data, for held-out data: auto gives both the same widths."""
    row = data.longest_row()
    most_tokens = positions if positions is not None and row <= positions else None  # the padded rows must fit too
    if asked != AUTO:
        multiple = 1 if asked is None else int(asked)
        return Padding(1 if most_tokens is not None and _rounded(row, multiple) > most_tokens else multiple)
    short = row <= LONG and not data.packed
    most = _rounded(row, STEP)
    usual = max(STEP, _rounded(-(-row // WIDTHS), STEP)) if short else STEP
    return Padding(usual if multiple is None else multiple, most if most_tokens is None else min(most, most_tokens))


def make_batch(dataset: Dataset, rows: Sequence[int], padding: Padding) -> Batch:
    """The rows of a data set as one batch of int64 tensors [B, T] on the CPU: all tokens are placed at once."""
    chosen = [dataset.rows[i] for i in rows]
    members = chosen if dataset.right is None else [[i] for row in chosen for i in row]  # the samples of each row
    sample_S = np.fromiter(chain.from_iterable(members), np.int64)
    length_S = dataset.starts[sample_S + 1] - dataset.starts[sample_S]
    length_B = np.add.reduceat(length_S, np.cumsum([0] + [len(row) for row in members[:-1]]))
    within_M = np.arange(int(length_S.sum())) - np.repeat(np.cumsum(length_S) - length_S, length_S)
    at_M = np.repeat(dataset.starts[sample_S], length_S) + within_M
    after_BT = np.arange(padding.width(int(length_B.max()))) - length_B[:, None]  # of padding: 0, 1, 2, ...
    real_BT = after_BT < 0

    def placed(x_M: np.ndarray, fill: int | np.ndarray) -> torch.Tensor:
        rows_BT = np.empty(real_BT.shape, dtype=np.int64)
        rows_BT[:] = fill
        rows_BT[real_BT] = x_M
        return torch.from_numpy(rows_BT)

    ids_M, targets = dataset.ids[at_M], dataset.targets
    batch = {"input_ids": placed(ids_M, dataset.pad_token_id)}
    if targets is None:
        batch["labels"] = placed(np.where(dataset.trained[at_M], ids_M, IGNORED), IGNORED)
    else:
        batch["labels"] = torch.tensor([targets[row[0]] for row in members])
    if dataset.types is not None:
        batch["token_type_ids"] = placed(dataset.types[at_M], 0)
    if dataset.packed:
        batch["position_ids"] = placed(within_M, after_BT)
    else:
        batch["attention_mask"] = torch.from_numpy(real_BT.astype(np.int64))
    if dataset.right is not None:
        size_Q = np.array([len(row) for row in chosen])
        right = np.cumsum(size_Q) - size_Q + np.array([dataset.right[i] for i in rows])
        batch["question"] = torch.from_numpy(np.repeat(np.arange(len(rows)), size_Q))
        batch["answer"] = torch.zeros(len(members), dtype=torch.int64).index_fill_(0, torch.from_numpy(right), 1)
    return batch


def collate(samples: Sequence[Sample], pad_token_id: int, multiple: int = 1) -> Batch:
    return make_batch(Dataset.of(samples, pad_token_id), range(len(samples)), Padding(multiple))


class Loader:
    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        gradient_accumulation_steps: int = 1,
        *,
        seed: int = 0,
        padding: Padding = USUAL,
        about: dict[str, Any] | None = None,
        stratified: bool = False,
    ) -> None:
        """stratified: each step has the classes of the whole data set. about: further facts about the data that a
        resumed run needs; kept in the state."""
        assert len(dataset) > 0 and batch_size > 0 and gradient_accumulation_steps > 0
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rows_per_step, self.padding = batch_size * gradient_accumulation_steps, padding
        self.stratified, self._classes = stratified, dataset.row_classes() if stratified else None
        self.fingerprint, self.about = dataset.fingerprint, about or {}
        self.position = (0, 0)  # epoch of the next step, and its offset in rows
        self._order: tuple[int, np.ndarray] | None = None
        self._last: list[int] = []

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.dataset) // self.rows_per_step)

    @property
    def epoch(self) -> float:
        """Passes over the data so far: 1.5 is halfway through the second."""
        return self.position[0] + self.position[1] / len(self.dataset)

    def order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            classes, count = self._classes, len(self.dataset)
            found = order(count, self.seed, epoch) if classes is None else stratified_order(classes, self.seed, epoch)
            self._order = epoch, found
        return self._order[1]

    def next_step(self) -> list[Mapping[str, torch.Tensor]]:
        epoch, offset = self.position
        self._last = rows = self.order_of(epoch)[offset : offset + self.rows_per_step].tolist()
        offset += len(rows)
        self.position = (epoch, offset) if offset < len(self.dataset) else (epoch + 1, 0)
        parts = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        return [make_batch(self.dataset, part, self.padding) for part in parts]

    __next__ = next_step

    def __iter__(self) -> "Loader":
        return self

    def coming(self, count: int, tokens: int) -> list[Batch]:
        """The rows of the coming steps, at most `count` and none twice, in batches of at most so many tokens with their
        padding, or of batch_size rows; the position stays."""
        rows: dict[int, None] = {}
        epoch, offset = self.position
        while len(rows) < min(count, len(self.dataset)):
            rows |= dict.fromkeys(self.order_of(epoch)[offset:].tolist())
            epoch, offset = epoch + 1, 0
        parts: list[list[int]] = [[]]
        longest = samples = 0
        for row in list(rows)[:count]:
            length, more = self.dataset.row_length(row), self.dataset.row_samples(row)
            full = (samples + more) * self.padding.width(max(longest, length)) > tokens
            if full and len(parts[-1]) >= self.batch_size:
                parts.append([])
                longest = samples = 0
            parts[-1].append(row)
            longest, samples = max(longest, length), samples + more
        return [make_batch(self.dataset, part, self.padding) for part in parts]

    def where(self, most: int = 4) -> str:
        """Where the samples of the last step came from, for error messages."""
        rows = [self.dataset.rows[row] for row in self._last]
        names = [i for row in rows for i in (row if self.dataset.right is None else row[:1])]
        shown = "; ".join(self.dataset.where[i] for i in names[:most])
        return shown + (f"; and {len(names) - most} more" if len(names) > most else "")

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.position[0], "offset": self.position[1], "seed": self.seed,
            "rows": len(self.dataset), "fingerprint": self.fingerprint, "stratified": self.stratified, **self.about,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the exact row; refuses data that differ from those of the saved state."""
        with as_user_error("resume: what the checkpoint says of its data cannot be used"):
            if state["fingerprint"] != self.fingerprint:
                raise UserError(
                    f"resume: the training data are not those of the checkpoint ({state['rows']:,} rows then, "
                    f"{len(self.dataset):,} now, or other tokens); restore train_data or task, the "
                    "tokenizer, chat_template and the settings of the data, or start anew in another output_dir"
                )
            for key, now in (("seed", self.seed), ("stratified", self.stratified)):
                if (before := state[key]) != now:
                    raise UserError(f"resume: {key}={now}, but the checkpoint's is {before}; set it back")
            self.position, self._last = (int(state["epoch"]), int(state["offset"])), []

    def report(self, asked: int | str | None, stratify: bool | str) -> list[str]:
        """The share of padding in an epoch, and the classes. asked, stratify: the settings."""
        data, first, padding = self.dataset, self.order_of(0), self.padding
        begins = np.arange(0, len(first), self.batch_size)
        longest = np.maximum.reduceat(np.array([data.row_length(i) for i in first]), begins)
        rows = np.add.reduceat(np.array([data.row_samples(i) for i in first]), begins)
        whole = sum(n * padding.width(length) for n, length in zip(rows.tolist(), longest.tolist(), strict=True))
        share = 1 - sum(data.lengths[i] for row in data.rows for i in row) / whole
        how = f"multiples of {padding.multiple} tokens" if padding.multiple > 1 else "the longest row of each batch"
        why = "null" if asked is None else asked
        lines = [f"padding: to {how} (pad_to_multiple_of={why}); {share:.1%} of the tokens are padding"]
        if self._classes is not None:
            counts = np.unique(self._classes, return_counts=True)[1]
            span = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
            lines.append(
                f"batches: stratified (stratify={str(stratify).lower()}), {len(counts)} classes of {span} rows"
            )
        return lines


class EvalBatches:
    """The batches of a data set in order, iterable any number of times; empty (and false) without a data set."""

    def __init__(self, dataset: Dataset | None, batch_size: int, padding: Padding = USUAL) -> None:
        self.dataset, self.batch_size, self.padding = dataset, batch_size, padding

    def __len__(self) -> int:
        return 0 if self.dataset is None else -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        if self.dataset is not None:
            for i in range(0, len(self.dataset), self.batch_size):
                yield make_batch(self.dataset, range(i, min(len(self.dataset), i + self.batch_size)), self.padding)
