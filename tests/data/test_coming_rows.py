"""Rows that a method looks at before it trains on them: those of the coming steps, in batches of bounded size."""

import numpy as np
import pytest

from keyhole.data.dataset import Dataset
from keyhole.data.loader import Loader


@pytest.mark.parametrize("kind", ["rows", "packed", "questions"])
def test_coming_rows_are_those_of_the_next_steps(kind: str) -> None:
    """In the same order, across the end of an epoch, none twice; the position stays."""
    lengths = [3, 5, 2, 4, 6, 3, 2, 5, 4, 3]
    ids = [np.arange(10 * i, 10 * i + n, dtype=np.int32) for i, n in enumerate(lengths)]
    trained = [np.ones(n, dtype=bool) for n in lengths]
    pairs = [[i, i + 1] for i in range(0, 10, 2)]
    about = {"packed": {"rows": pairs}, "questions": {"questions": (pairs, [0, 1, 0, 1, 0])}}.get(kind, {})
    dataset = Dataset(ids, trained, **about)
    loader = Loader(dataset, batch_size=2)
    loader.next_step()
    count, before = len(dataset), loader.position
    coming = [row for one in loader.coming(100, 12) for row in one["input_ids"].tolist()]
    assert loader.position == before

    def content(rows: list[list[int]]) -> list[tuple[int, ...]]:
        return [tuple(x for x in row if x) for row in rows]

    next_rows = [row for _ in range(2 * count) for one in loader.next_step() for row in one["input_ids"].tolist()]
    expected = list(dict.fromkeys(content(next_rows)))
    assert content(coming) == expected and len(set(content(coming))) == len(coming)


@pytest.mark.parametrize("kind", ["rows", "packed", "questions"])
def test_batches_of_coming_rows_are_bounded_with_their_padding(kind: str) -> None:
    """One long row among short ones makes small batches of those beside it alone."""
    lengths = [100 if i == 17 else 4 for i in range(60)]
    pairs = [[i, i + 1] for i in range(0, 60, 2)]
    about = {"packed": {"rows": pairs}, "questions": {"questions": (pairs, [0] * 30)}}.get(kind, {})
    ids = [np.ones(n, dtype=np.int32) for n in lengths]
    loader = Loader(Dataset(ids, [np.ones(n, dtype=bool) for n in lengths], **about), batch_size=2)
    coming = loader.coming(60, 160)
    per_row = 2 if kind == "questions" else 1
    for one in coming:
        assert one["input_ids"].numel() <= 160 or len(one["input_ids"]) == 2 * per_row
    assert sum(len(one["input_ids"]) for one in coming) == per_row * len(loader.dataset)
    assert max(len(one["input_ids"]) for one in coming) > 2 * per_row
