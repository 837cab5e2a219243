"""Stratified batches: every row once per epoch, every batch with the classes of the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.dataset import Dataset
from keyhole.data.epoch import order, stratified_order, stratifies
from keyhole.data.loader import Loader
from keyhole.errors import UserError

CLASSES = st.lists(st.integers(0, 3), min_size=2, max_size=60).filter(lambda found: len(set(found)) > 1)


def dataset(classes: list[int] | None, packed: bool = False) -> Dataset:
    count = 6 if classes is None else len(classes)
    rows = [[i] for i in range(count)] if packed else None
    ids = [np.array([i, i]) for i in range(count)]
    return Dataset(ids, [np.ones(2, dtype=bool)] * count, rows=rows, classes=classes)


@given(CLASSES, st.integers(0, 2**63), st.integers(0, 3), st.integers(1, 20))
def test_batches_have_the_shares_of_the_whole(classes: list[int], seed: int, epoch: int, size: int) -> None:
    """Any `size` consecutive rows have size n_c / N rows of a class, to less than 1 + C n_c / N."""
    class_N = np.array(classes)
    order_N = stratified_order(class_N, seed, epoch)
    assert sorted(order_N) == list(range(len(classes)))
    counts, number = np.bincount(class_N, minlength=4), len(set(classes))
    for begin in range(max(1, len(classes) - size)):
        rows = order_N[begin : begin + size]
        found = np.bincount(class_N[rows], minlength=4)
        expected = len(rows) * counts / len(classes)
        assert (abs(found - expected) < 1 + number * counts / len(classes) + 1e-9).all()


def test_two_equal_classes_alternate_in_shuffled_order() -> None:
    """8 and 8 in every batch of 16; within a class, rows keep the order of the shuffle; epochs and seeds differ."""
    class_N = np.arange(320) % 2
    found = stratified_order(class_N, 0, 0)
    assert all(class_N[found[i : i + 16]].sum() == 8 for i in range(0, 320, 16))
    shuffled = order(320, 0, 0)
    assert all((found[class_N[found] == c] == shuffled[class_N[shuffled] == c]).all() for c in (0, 1))
    others = [stratified_order(class_N, *where) for where in ((0, 1), (1, 0))]
    assert all((found != other).any() for other in others) and (found == stratified_order(class_N, 0, 0)).all()


def test_a_state_of_another_order_is_refused() -> None:
    """A checkpoint from before the setting was not stratified."""
    data = dataset([0, 1, 0, 1])
    state = Loader(data, 2).state_dict()
    del state["stratified"]
    Loader(data, 2).load_state_dict(state)
    with pytest.raises(UserError, match="stratified=True, but the checkpoint's is False"):
        Loader(data, 2, stratified=True).load_state_dict(state)


def test_what_auto_decides() -> None:
    """Stratified if there are several classes and rows are of one class each; a wish for more is refused."""
    several, packed, same, none = dataset([0, 1, 1]), dataset([0, 1, 1], packed=True), dataset([2, 2]), dataset(None)
    assert [stratifies(data, "auto") for data in (several, packed, same, none)] == [True, False, False, False]
    assert not stratifies(several, False) and stratifies(several, True)
    with pytest.raises(UserError, match="stratify: true needs rows with labels"):
        stratifies(packed, True)
    several.choose([1, 2, 2])
    assert not stratifies(several, "auto")
