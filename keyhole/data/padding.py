"""The width of a batch: rows of different lengths are padded on the right to one of a few widths.

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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keyhole.data.dataset import Dataset
from keyhole.data.settings import AUTO, BEFORE

LONG, WIDTHS, STEP = 1024, 8, 8


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
    lengths: np.ndarray = np.asarray(data.lengths, dtype=np.int64)
    width: Sequence[int] | np.ndarray
    tokens: Sequence[int] | np.ndarray
    count: Sequence[int] | np.ndarray
    if data.packed or data.right is not None:
        parts = [lengths[row] for row in data.rows]
        width = [int(part.sum()) if data.packed else int(part.max()) for part in parts]
        tokens = [int(part.sum()) for part in parts]
        count = [1 if data.packed else len(part) for part in parts]
    else:
        width = tokens = lengths[[row[0] for row in data.rows]]
        count = np.ones(len(data.rows), dtype=np.int64)
    begins = np.arange(0, len(order), batch_size)
    longest = np.maximum.reduceat(np.asarray(width)[order], begins)
    rows = np.add.reduceat(np.asarray(count)[order], begins)
    padded = np.array([padding.width(int(n)) for n in longest])
    real, ragged, whole = int(np.sum(tokens)), int((rows * longest).sum()), int((rows * padded).sum())
    shapes = len(set(zip(rows.tolist(), padded.tolist(), strict=True)))
    how = f"multiples of {padding.multiple} tokens" if padding.multiple > 1 else "the longest row of each batch"
    why = "null" if asked is None else asked
    counted_shapes = "1 shape" if shapes == 1 else f"{shapes:,} shapes"
    return (
        f"padding: to {how} (pad_to_multiple_of={why}), {counted_shapes} of batches per epoch; "
        f"{1 - real / whole:.1%} of the tokens are padding, {1 - real / ragged:.1%} without the multiples"
    )
