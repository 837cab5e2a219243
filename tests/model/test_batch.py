"""Batches on their way to the device: what is predicted from where, found on the host."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.model.batch import as_list, to_device

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
