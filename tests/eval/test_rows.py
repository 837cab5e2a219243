"""Many rows in few passes: the order is restored, nothing is lost, and the link is crossed as seldom as promised."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyhole
from keyhole.data.dataset import IGNORED, Sample
from keyhole.eval.rows import plan_batches, score_rows
from tests.model.streaming import streamed


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(1, 200))
def test_batches_hold_every_row_once(lengths: list[int], batch_tokens: int) -> None:
    """Each row is in one batch; a batch with its padding is within the limit unless it is a single long row."""
    batches = plan_batches(lengths, batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= batch_tokens
    tops = [lengths[batch[0]] for batch in batches]
    assert tops == sorted(tops, reverse=True)


def rows(lengths: list[int]) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(5, 200, (length,), generator=generator).tolist() for length in lengths]
    return [Sample(x, [IGNORED] * (len(x) // 2) + x[len(x) // 2 :]) for x in ids]


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_rows_score_as_they_do_alone(tiny_model: Path, placement: str) -> None:
    model = keyhole.load(tiny_model, device="cpu", placement=placement)
    samples = rows([9, 2, 30, 4, 17, 2, 8])
    nll_R, count_R = score_rows(model, samples, batch_tokens=40, passes=2)
    for i, sample in enumerate(samples):
        ids, labels = torch.tensor([sample.input_ids]), torch.tensor([sample.labels])
        nll_B, count_B = model.nll({"input_ids": ids, "labels": labels})
        torch.testing.assert_close(nll_R[i].float(), nll_B[0], rtol=1e-5, atol=1e-5)
        assert count_R[i] == count_B[0] > 0
    assert nll_R.dtype == torch.float64


@pytest.mark.parametrize("passes", [1, 3, 8])
def test_the_link_is_crossed_once_a_group(tiny_model: Path, passes: int) -> None:
    """Bytes over the link are the streamed weights times the number of groups, not of rows."""
    model = streamed(keyhole.load(tiny_model, device="cpu"), keep=("table", "head"), slot_count=1)
    samples = rows([10] * 24)
    batches = plan_batches([10] * 24, 40)
    assert len(batches) == 6
    visited = [model.layout.units[i] for i in model.engine.streamed]
    weights = sum(unit.numel for unit in visited) * 4
    score_rows(model, samples, batch_tokens=40, passes=passes)
    prefetched = model.engine.slot_count * model.engine.slot_bytes
    assert 0 <= model.engine.bytes_up - weights * math.ceil(6 / passes) <= prefetched


def test_no_rows(tiny_model: Path) -> None:
    nll_R, count_R = score_rows(keyhole.load(tiny_model, device="cpu"), [])
    assert nll_R.shape == count_R.shape == (0,)
