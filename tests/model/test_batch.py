"""Batches on their way to the device: what is predicted from where, found on the host."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import UserError
from keyhole.model.batch import as_list, check, to_device

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
def test_trained_positions_are_those_before_a_label(trained: list[list[bool]]) -> None:
    """Position t is picked exactly when token t + 1 is trained, and its target is that token."""
    trained_BT = torch.tensor(trained)
    ids_BT = torch.arange(trained_BT.numel()).view(trained_BT.shape)
    labels_BT = torch.where(trained_BT, ids_BT, -100)
    out = to_device({"input_ids": ids_BT, "labels": labels_BT}, CPU)
    expected = [(b, t) for b, row in enumerate(trained) for t in range(5) if row[t + 1]]
    assert out.index_N.tolist() == [b * 6 + t for b, t in expected]
    assert out.target_N.tolist() == [b * 6 + t + 1 for b, t in expected]
    assert out.row_N.tolist() == [b for b, _ in expected]
    assert (out.row_count, out.token_count) == (len(trained), len(expected))


def test_a_mask_that_says_nothing_is_dropped() -> None:
    """All ones cost attention kernels and change nothing; any zero is kept. Positions pass through."""
    ids = torch.ones(2, 4, dtype=torch.long)
    mask = torch.ones_like(ids)
    one = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    assert set(to_device(one, CPU).inputs) == {"input_ids"}
    mask[1, 3] = 0
    assert set(to_device(one, CPU).inputs) == {"input_ids", "attention_mask"}
    packed = {"input_ids": ids, "labels": ids, "position_ids": ids}
    assert set(to_device(packed, CPU).inputs) == {"input_ids", "position_ids"}


def test_a_batch_or_its_micro_batches() -> None:
    """A step takes either."""
    assert as_list({"labels": torch.zeros(1)})[0].keys() == {"labels"}
    assert len(as_list([{}, {}])) == 2


IDS = torch.tensor([[1, 2, 3], [4, 5, 9]])
WRONG = {
    "needed, found labels": {"labels": IDS},
    "found list": [IDS],
    "labels is (2, 2)": {"input_ids": IDS, "labels": IDS[:, :2]},
    "input_ids is (3,)": {"input_ids": IDS[0], "labels": IDS[0]},
    "input_ids is (0, 3)": {"input_ids": IDS[:0], "labels": IDS[:0]},
    "labels is list": {"input_ids": IDS, "labels": IDS.tolist()},
    "input_ids is torch.float32": {"input_ids": IDS.float(), "labels": IDS},
    "input_ids holds 1 to 9; the model has tokens 0 to 8": {"input_ids": IDS, "labels": torch.full_like(IDS, -100)},
    "labels holds -1 to 8; the model has tokens 0 to 8, or -100": {"input_ids": IDS - 1, "labels": IDS - 2 + (IDS > 8)},
    "attention_mask is (2, 1)": {"input_ids": IDS - 1, "labels": IDS - 1, "attention_mask": IDS[:, :1]},
}


@pytest.mark.parametrize("says", WRONG)
def test_what_cannot_be_trained_on_is_refused(says: str) -> None:
    """By name, before anything is sent."""
    with pytest.raises(UserError) as error:
        check(WRONG[says], 9)
    assert says in str(error.value)
    check({"input_ids": IDS - 1, "labels": torch.where(IDS > 2, IDS - 1, -100)}, 9)


def test_a_step_without_batches_is_refused() -> None:
    empty: list[Any] = []
    with pytest.raises(UserError, match="at least one"):
        as_list(empty)
