"""The loader's order is a pure function of seed and epoch, and resuming is exact."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.dataset import Dataset, Sample
from keyhole.data.epoch import Padding, _splitmix64, order
from keyhole.data.loader import Batch, EvalBatches, Loader, collate, make_batch
from keyhole.errors import UserError


def dataset(count: int, packed: bool = False) -> Dataset:
    """Sample i is i + 2 tokens of value i."""
    ids = [np.full(i + 2, i) for i in range(count)]
    rows = [[i] for i in range(count)] if packed else None
    return Dataset(ids, [np.ones(i + 2, dtype=bool) for i in range(count)], rows=rows)


def seen(step: list[Batch]) -> list[int]:
    return [int(row[0]) for batch in step for row in batch["input_ids"]]


SIZES = {"count": st.integers(1, 30), "batch_size": st.integers(1, 5), "steps": st.integers(1, 4)}


@given(**SIZES, seed=st.integers(0, 2**63), shuffle=st.booleans())
def test_every_sample_once_an_epoch(count: int, batch_size: int, steps: int, seed: int, shuffle: bool) -> None:
    """An epoch is steps_per_epoch steps and every row exactly once; only its last step may be smaller."""
    loader = Loader(dataset(count), batch_size, steps, seed=seed, shuffle=shuffle)
    for epoch in range(2):
        taken = [loader.next_step() for _ in range(loader.steps_per_epoch)]
        assert sorted(i for step in taken for i in seen(step)) == list(range(count))
        assert all(len(seen(step)) == batch_size * steps for step in taken[:-1])
        assert all(len(batch["input_ids"]) == batch_size for step in taken for batch in step[:-1])
        assert all(step and all(len(b["input_ids"]) for b in step) for step in taken)
        assert loader.epoch == epoch + 1


@given(**SIZES, before=st.integers(0, 12), after=st.integers(1, 12), seed=st.integers(0, 1000))
def test_resume_is_exact(count: int, batch_size: int, steps: int, before: int, after: int, seed: int) -> None:
    """N + M steps are N steps, a state through JSON, a new loader, and M steps, tensor for tensor."""
    data = dataset(count)
    straight = Loader(data, batch_size, steps, seed=seed)
    for _ in range(before):
        straight.next_step()
    resumed = Loader(data, batch_size, steps, seed=seed)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.epoch == straight.epoch
    for _ in range(after):
        for a, b in zip(next(straight), next(resumed), strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_the_offset_counts_rows() -> None:
    """Another batch size goes on at the row where the first stopped."""
    first = Loader(dataset(20), 4)
    head = seen(first.next_step())
    second = Loader(dataset(20), 2, 3)
    second.load_state_dict(first.state_dict())
    rest = [i for _ in range(3) for i in seen(second.next_step())]
    assert sorted(head + rest) == list(range(20))


@given(count=st.integers(0, 200), seed=st.integers(-(2**40), 2**64), epoch=st.integers(0, 100))
def test_an_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    """Of all rows, the same every time it is asked for."""
    assert sorted(order(count, seed, epoch)) == list(range(count))
    assert np.array_equal(order(count, seed, epoch), order(count, seed, epoch))


def test_orders_are_what_they_have_always_been() -> None:
    """Stored values: a library update that changed the order would break every resume."""
    assert order(8, 0, 0).tolist() == [4, 6, 7, 2, 1, 5, 3, 0]
    assert order(8, 0, 1).tolist() == [7, 1, 0, 6, 4, 5, 2, 3]
    assert order(8, 1, 0).tolist() == [3, 6, 7, 2, 5, 0, 4, 1]
    assert int(_splitmix64(np.uint64(0))) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    assert order(4, 1, 0, shuffle=False).tolist() == [0, 1, 2, 3]


def test_other_data_or_another_seed_is_refused() -> None:
    """A position in other data means nothing; the error says what to restore."""
    state = Loader(dataset(5), 2).state_dict()
    with pytest.raises(UserError, match=r"not those of the checkpoint \(5 rows then, 6 now"):
        Loader(dataset(6), 2).load_state_dict(state)
    with pytest.raises(UserError, match="not those of the checkpoint"):
        Loader(dataset(5, packed=True), 2).load_state_dict(state)
    with pytest.raises(UserError, match="seed=1, but the checkpoint's is 0"):
        Loader(dataset(5), 2, seed=1).load_state_dict(state)


def test_collate_pads_on_the_right() -> None:
    """Pad token, label -100 and mask 0 after the end of a row; int64; width a multiple of 8."""
    batch = collate([Sample([1, 2, 3], [-100, 2, 3]), Sample([4], [-100])], pad_token_id=9)
    assert all(x.shape == (2, 8) and x.dtype == torch.int64 for x in batch.values())
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9, 9], [4, 9, 9, 9, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3] + [-100] * 5, [-100] * 8]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=12),
    kind=st.sampled_from(["plain", "packed", "questions", "classes", "values with types"]),
    multiple=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_a_batch_is_what_its_samples_collate_to(lengths: list[int], kind: str, multiple: int, seed: int) -> None:
    """The loader places the tokens of all rows at once; `collate` takes them sample by sample."""
    draw, count = np.random.default_rng(seed), len(lengths)
    ids = [draw.integers(0, 99, n).astype(np.int32) for n in lengths]
    trained = [draw.random(n) < 0.5 for n in lengths]
    halves = [list(range(count // 2)), list(range(count // 2, count))]
    right = [int(draw.integers(len(half))) for half in halves]
    how = {
        "plain": {},
        "packed": {"rows": halves},
        "questions": {"questions": (halves, right)},
        "classes": {"targets": draw.integers(0, 3, count).tolist()},
        "values with types": {"targets": draw.random(count).tolist(), "types": [[1] * n for n in lengths]},
    }
    data = Dataset(ids, trained, pad_token_id=7, **how[kind])
    rows = draw.permutation(len(data)).tolist()
    samples = [s for i in rows for s in (data.candidates(i) if kind == "questions" else [data[i]])]
    found, expected = make_batch(data, rows, Padding(multiple)), collate(samples, 7, multiple)
    if kind == "questions":
        expected["question"] = torch.tensor([q for q, i in enumerate(rows) for _ in halves[i]])
        expected["answer"] = torch.tensor([int(k == right[i]) for i in rows for k in range(len(halves[i]))])
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert x.dtype == found[name].dtype and torch.equal(x, found[name]), name


def test_packed_batches_have_positions_and_no_mask() -> None:
    """Padding is one more sample, with positions from 0."""
    samples = [Sample([1, 2, 3], [-100, 2, -100], [0, 1, 0]), Sample([4], [-100], [0])]
    batch = collate(samples, 9, pad_to_multiple_of=1)
    assert "attention_mask" not in batch
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 1]]


def test_where_names_the_samples_of_the_last_step() -> None:
    """For the error that says which batch broke a run."""
    loader = Loader(dataset(9), 3, 2, shuffle=False)
    loader.next_step()
    assert loader.where(2) == "sample 1; sample 2; and 4 more"
    loader.next_step()
    assert loader.where() == "sample 7; sample 8; sample 9"


def test_eval_batches_come_in_order_and_again() -> None:
    """Every row once, as often as asked; without data there are none, and that is false."""
    batches = EvalBatches(dataset(5), 2)
    assert len(batches) == 3 and batches
    assert [seen([b]) for b in batches] == [[0, 1], [2, 3], [4]] == [seen([b]) for b in batches]
    assert not EvalBatches(None, 2) and list(EvalBatches(None, 2)) == []
