"""Few widths, and no number that depends on them beyond rounding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyhole
from keyhole.data.dataset import Dataset, Sample
from keyhole.data.epoch import Padding, choose, describe
from keyhole.data.loader import Batch, collate
from tests.training.classifiers import save_encoder


def rows(lengths: list[int]) -> Dataset:
    """Rows of so many tokens, all of them trained."""
    return Dataset([np.full(n, 3, dtype=np.int32) for n in lengths], [np.ones(n, dtype=bool) for n in lengths])


@given(longest=st.integers(2, 1024), positions=st.none() | st.integers(2, 2048))
def test_auto_has_at_most_eight_widths(longest: int, positions: int | None) -> None:
    """Short rows fall into eight widths or fewer; none is too narrow, or wider than the longest row rounded up to 8,
    and none passes the last position of a model that has so many."""
    padding = choose(rows([2, longest]), "auto", positions)
    widths = {n: padding.width(n) for n in range(1, longest + 1)}
    assert len(set(widths.values())) <= 8
    assert all(n <= width <= -(-longest // 8) * 8 for n, width in widths.items())
    assert positions is None or longest > positions or max(widths.values()) <= positions


def test_a_number_and_null_mean_what_they_say() -> None:
    """64 is multiples of 64, null is the longest row; a number that would pass the last position is 1, as it was."""
    data = rows([5, 100])
    assert [choose(data, 64, None).width(n) for n in (5, 64, 65)] == [64, 64, 128]
    assert choose(data, None, None).width(37) == 37
    assert choose(data, 8, 100) == Padding(1) and choose(data, 8, 104) == choose(data, 8, None) == Padding(8)


def test_held_out_data_share_the_widths_of_training() -> None:
    """A shorter eval set has no widths of its own, but for its last one."""
    padding = choose(rows([3, 40]), "auto", None, multiple=64)
    assert padding == Padding(64, 40)


def test_the_report_counts_padding_by_hand() -> None:
    """Rows 4, 10 | 6 in batches of two: 20 tokens in 26 places; to multiples of 8 in 2 x 16 + 8 = 40."""
    line = describe(rows([4, 10, 6]), np.arange(3), 2, Padding(8), 8)
    assert "multiples of 8 tokens (pad_to_multiple_of=8), 2 shapes" in line
    assert "50.0% of the tokens are padding, 23.1% without" in line


def text_batch(width: int) -> Batch:
    draw = np.random.default_rng(0)
    samples = []
    for n in (5, 11, 9):
        ids = draw.integers(5, 200, n).tolist()
        samples.append(Sample(ids, [-100, -100, *ids[2:]]))
    return collate(samples, 0, width)


def candidate_batch(width: int) -> Batch:
    return text_batch(width) | {"question": torch.tensor([0, 0, 0]), "answer": torch.tensor([0, 1, 0])}


def class_batch(width: int) -> Batch:
    draw = np.random.default_rng(0)
    rows = [draw.integers(4, 20, n).tolist() for n in (5, 11, 9)]
    return collate(
        [Sample(row, [-100] * len(row), None, [0] * len(row), i % 2) for i, row in enumerate(rows)], 1, width
    )


@pytest.mark.parametrize("kind", ["tokens", "candidates", "encoder"])
def test_padding_changes_neither_loss_nor_gradient(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """A decoder by tokens and by candidates, an encoder by labels: loss and every gradient agree to rounding in fp32.

    Products of another width add up in another order: 2^-24 for each of 32 positions.
    """
    make = {"tokens": text_batch, "candidates": candidate_batch, "encoder": class_batch}[kind]
    how = {"head": "classification", "num_labels": 2} if kind == "encoder" else {}
    source = save_encoder("bert", tmp_path / "bert") if kind == "encoder" else tiny_model
    found = []
    for width in (1, 32):
        model = keyhole.load(source, dtype="float32", device="cpu", **how)
        before = {name: p.detach().clone().double() for name, p in model.module.named_parameters()}
        opt = keyhole.LOMO(model, lr=1.0, weight_decay=0.0, model_dropout=False)
        loss = float(opt.step(make(width)))
        opt.flush()
        moved = {name: before[name] - p.detach().double() for name, p in model.module.named_parameters()}
        found.append((loss, moved))
        model.close()
    (loss, grads), (padded_loss, padded_grads) = found
    assert abs(loss - padded_loss) < 1e-6 * max(1, abs(loss))
    assert max(float(grad.abs().max()) for grad in grads.values()) > 1e-3
    for name, grad in grads.items():
        scale = max(1.0, float(grad.abs().max()))
        assert float((grad - padded_grads[name]).abs().max()) < 2e-6 * scale, name
