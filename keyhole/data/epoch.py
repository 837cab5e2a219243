"""The order of rows in an epoch: a pure function of (seed, epoch), with labels spread evenly where rows have them.

    order(seed, e) = row indices sorted by splitmix64(seed, e, index)      no generator, no state

A small batch that happens to have too many rows of one label has a gradient that points towards this label for every
input. That part of the gradient is noise: it averages to zero over batches. It matters most for zeroth-order steps,
which move *every* weight by (g . z) z_i, so that every weight's noise has the size of the whole batch gradient:

    E ((g . z) z_i)^2  =  |g|^2 + 2 g_i^2                 g: gradient of the batch, z ~ N(0, 1)

So (setting `stratify`; auto: if there are classes) with n_c of N rows in class c, the k-th row of a class in the
shuffled order gets the place (k + u_c) / n_c, where u_c in [0, 1) depends on (seed, epoch, c); the epoch is sorted by
place. Every row is still used once per epoch, and in a batch of B rows each of C classes has

    | rows of c  -  B n_c / N |  <  1 + C n_c / N                    two equal classes, B = 16: 8 and 8

Classes are (task, label) if all questions of a task have the same candidates, or a classifier's labels; tasks without
labels are one class each, so that a mixture of tasks is even too. A run keeps its order: the decision is in the
loader's state.

The width of a batch: rows of different lengths are padded on the right to one of a few widths.

Every new shape of a batch costs time: kernels are selected again, memory is allocated again, and CUDA graphs of blocks
are captured again. Short rows differ in length from batch to batch, so a batch is padded a little further than to its
longest row (setting `pad_to_multiple_of`):

    auto       at most 1024 tokens in the longest row L:  multiples of max(8, L / 8 rounded up to a multiple of 8),
               the last one cut to L rounded up to 8: at most 8 widths; longer rows, and packed ones: multiples of 8
    a number   multiples of it; of 1 if the longest row would be padded beyond the model's last position
    null       the longest row of the batch

Padding is masked, has no label, and follows the tokens; the loss is a mean over trained tokens. So it changes results
only by rounding (sums of another length may be split differently), except in models with dropout, whose masks depend on
the shape. A run keeps its padding: the numbers are in the loader's state. Runs from before this setting used multiples
of 8, by the rule for a number.
"""

from typing import NamedTuple

import numpy as np

from keyhole.data.dataset import Dataset
from keyhole.data.settings import AUTO, BEFORE
from keyhole.errors import UserError
from keyhole.machine.text import counted

LONG, WIDTHS, STEP = 1024, 8, 8


def order(count: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Row indices of an epoch. The same on every machine and every version of every library."""
    if not shuffle:
        return np.arange(count)
    key = _splitmix64(np.uint64(seed % 2**64)) ^ _splitmix64(~np.uint64(epoch))
    order_N: np.ndarray = np.argsort(_splitmix64(_splitmix64(np.arange(count, dtype=np.uint64) ^ key)), kind="stable")
    return order_N


def stratified_order(class_N: np.ndarray, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Row indices of an epoch in which the rows of each class are spread evenly."""
    order_N, classes = order(len(class_N), seed, epoch, shuffle), int(class_N.max()) + 1
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


def describe_classes(data: Dataset, asked: bool | str) -> str:
    """A line for the report."""
    counts = np.unique(data.row_classes(), return_counts=True)[1]
    low, high = int(counts.min()), int(counts.max())
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"batches: stratified (stratify={str(asked).lower()}), {len(counts)} classes of {span} rows"


class Padding(NamedTuple):
    """Batches have a multiple of `multiple` tokens per row, but no more than `most` (None: no limit)."""

    multiple: int = BEFORE
    most: int | None = None

    def width(self, longest: int) -> int:
        """Tokens per row of a batch whose longest row has `longest` tokens."""
        width = _rounded(longest, self.multiple)
        return width if self.most is None else max(longest, min(width, self.most))


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def longest_row(data: Dataset) -> int:
    """Tokens of the longest row."""
    return max(data.row_length(i) for i in range(len(data))) if data.packed else max(data.lengths)


def choose(data: Dataset, asked: int | str | None, positions: int | None, multiple: int | None = None) -> Padding:
    """The padding of a data set. positions: the last position of the model, if its config has one. multiple: that of
    the training data, for held-out data: auto gives both the same widths."""
    row = longest_row(data)
    most_tokens = positions if positions is not None and row <= positions else None  # the padded rows must fit too
    if asked != AUTO:
        multiple = 1 if asked is None else int(asked)
        return Padding(1 if most_tokens is not None and _rounded(row, multiple) > most_tokens else multiple)
    short = row <= LONG and not data.packed
    most = _rounded(row, STEP)
    usual = max(STEP, _rounded(-(-row // WIDTHS), STEP)) if short else STEP
    return Padding(usual if multiple is None else multiple, most if most_tokens is None else min(most, most_tokens))


def describe(data: Dataset, order: np.ndarray, batch_size: int, padding: Padding, asked: int | str | None) -> str:
    """The share of padding in an epoch with this order of rows, with and without the multiples."""
    width_N = np.array([data.row_length(i) for i in range(len(data))])
    count_N = np.array([data.row_samples(i) for i in range(len(data))])
    begins = np.arange(0, len(order), batch_size)
    longest = np.maximum.reduceat(width_N[order], begins)
    rows = np.add.reduceat(count_N[order], begins)
    padded = np.array([padding.width(int(n)) for n in longest])
    real = sum(data.lengths[i] for row in data.rows for i in row)
    ragged, whole = int((rows * longest).sum()), int((rows * padded).sum())
    shapes = len(set(zip(rows.tolist(), padded.tolist(), strict=True)))
    how = f"multiples of {padding.multiple} tokens" if padding.multiple > 1 else "the longest row of each batch"
    why = "null" if asked is None else asked
    return (
        f"padding: to {how} (pad_to_multiple_of={why}), {counted(shapes, 'shape')} of batches per epoch; "
        f"{1 - real / whole:.1%} of the tokens are padding, {1 - real / ragged:.1%} without the multiples"
    )
