"""Batches with the labels of the whole data set: rows of each class are spread evenly over an epoch.

A small batch that happens to have too many rows of one label has a gradient that points towards this label for every
input. That part of the gradient is noise: it averages to zero over batches. It matters most for zeroth-order steps,
which move *every* weight by (g . z) z_i, so that every weight's noise has the size of the whole batch gradient:

    E ((g . z) z_i)^2  =  |g|^2 + 2 g_i^2                 g: gradient of the batch, z ~ N(0, 1)

(SmolLM2-135M on SST-2: 58 % of the variance between batches is label balance; LOG.md.)

With n_c of N rows in class c, the k-th row of a class in the shuffled order gets the place (k + u_c) / n_c, where u_c
in [0, 1) depends on (seed, epoch, c); the epoch is sorted by place. Every row is still used once per epoch, the order
is still a pure function of (seed, epoch), and in a batch of B rows each of C classes has

    | rows of c  -  B n_c / N |  <  1 + C n_c / N                    two equal classes, B = 16: 8 and 8

Classes are (task, label) if all questions of a task have the same candidates, or a classifier's labels; tasks without
labels are one class each, so that a mixture of tasks is even too. Setting `stratify`: auto = if there are classes.
A run keeps its order: the decision is in the loader's state. Runs from before this setting were not stratified.
"""

from typing import Any

import numpy as np

from keyhole.data.dataset import Dataset
from keyhole.data.settings import AUTO
from keyhole.errors import UserError


def spread(order_N: np.ndarray, class_N: np.ndarray, offset_C: np.ndarray) -> np.ndarray:
    """The order with each class spread evenly. class_N: of each row; offset_C: u of each class, in [0, 1)."""
    ordered_N = class_N[order_N]
    place_N = np.empty(len(order_N))
    for c, offset in enumerate(offset_C):
        own = np.flatnonzero(ordered_N == c)
        place_N[own] = (np.arange(len(own)) + offset) / max(1, len(own))
    stratified_N: np.ndarray = order_N[np.argsort(place_N, kind="stable")]
    return stratified_N


def decide(data: Dataset, asked: bool | str) -> bool:
    """Whether batches are stratified; refuses a wish that cannot be fulfilled."""
    found = data.row_classes() is not None
    if asked is True and not found:
        raise UserError(
            "stratify: true needs rows with labels (a task whose questions have the same candidates, or several "
            "tasks), without packing; leave stratify out"
        )
    return found if asked == AUTO else bool(asked)


def describe(data: Dataset, asked: Any) -> str:
    """A line for the report."""
    counts = np.unique(data.row_classes(), return_counts=True)[1]
    return f"batches: stratified (stratify={str(asked).lower()}), {len(counts)} classes of {_span(counts)} rows"


def _span(counts: np.ndarray) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
