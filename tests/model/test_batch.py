"""Batches on their way to the device: what is predicted from where, found on the host."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyhole
from keyhole.errors import UserError
from keyhole.model.batch import as_list, check, split, to_device
from tests.model.decoders import batch, config, load

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
def test_trained_positions_are_those_before_a_label(trained: list[list[bool]]) -> None:
    trained_BT = torch.tensor(trained)
    ids_BT = torch.arange(trained_BT.numel()).view(trained_BT.shape)
    labels_BT = torch.where(trained_BT, ids_BT, -100)
    out = to_device({"input_ids": ids_BT, "labels": labels_BT}, CPU)
    expected = [(b, t) for b, row in enumerate(trained) for t in range(5) if row[t + 1]]
    assert out.index_N.tolist() == [b * 6 + t for b, t in expected]
    assert out.target_N.tolist() == [b * 6 + t + 1 for b, t in expected]
    assert out.loss.row_N.tolist() == [b for b, _ in expected]
    assert (out.loss.row_count, out.token_count) == (len(trained), len(expected))


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
    "attention_mask holds 1 to 9; 0 and 1 are needed": {"input_ids": IDS - 1, "labels": IDS - 1, "attention_mask": IDS},
    "batch: token_type_ids, weights: not used here": dict.fromkeys(("input_ids", "labels"), IDS - 1)
    | {"token_type_ids": IDS, "weights": IDS},
}


@pytest.mark.parametrize("says", WRONG)
def test_what_cannot_be_trained_on_is_refused(says: str) -> None:
    with pytest.raises(UserError) as error:
        check(WRONG[says], 9)
    assert says in str(error.value)
    check({"input_ids": IDS - 1, "labels": torch.where(IDS > 2, IDS - 1, -100)}, 9)


def test_a_step_without_batches_is_refused() -> None:
    empty: list[Any] = []
    with pytest.raises(UserError, match="at least one"):
        as_list(empty)


def test_what_a_hugging_face_collator_returns_is_a_batch() -> None:
    """A BatchEncoding is a Mapping and no dict; the README's own loop hands one over."""
    from transformers import BatchEncoding

    made = BatchEncoding({"input_ids": IDS - 1, "labels": IDS - 1})
    check(made, 9)
    assert as_list(made) == [made] and to_device(made, CPU).token_count == 4
    model = load("llama")
    loss = keyhole.SGD(model).step(BatchEncoding(batch()))
    assert torch.isfinite(loss) and torch.is_tensor(model.nll(BatchEncoding(batch()))[0])


def two_samples(padding: int) -> dict[str, torch.Tensor]:
    """Samples of 8 and 5 tokens in one row, with a mask and so much padding."""
    ids = batch(1, 13)["input_ids"]
    labels = ids.clone()
    labels[:, 8] = -100
    positions = torch.cat([torch.arange(8), torch.arange(5)])[None]
    made = {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    fill = {"labels": -100}
    return {name: torch.nn.functional.pad(x, (0, padding), value=fill.get(name, 0)) for name, x in made.items()}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_packed_samples_do_not_see_each_other_whatever_the_mask(family: str, padding: int) -> None:
    model, packed = load(family), two_samples(padding)
    ids = packed["input_ids"]
    alone = [model.nll({"input_ids": x, "labels": x})[0] for x in (ids[:, :8], ids[:, 8:13])]
    assert torch.allclose(model.nll(packed)[0], alone[0] + alone[1], atol=1e-4)


def test_left_padding_is_no_packing() -> None:
    """Positions as generation makes them: the mask stays, and nothing is asked of the model."""
    ids, mask = batch(1, 6)["input_ids"], torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    sent = to_device({"input_ids": ids, "labels": ids, "attention_mask": mask, "position_ids": positions}, CPU)
    assert not sent.packed and torch.equal(sent.inputs["attention_mask"], mask)
    hole = two_samples(0) | {"attention_mask": torch.tensor([[1] * 5 + [0] + [1] * 7])}
    with pytest.raises(UserError, match="hides tokens before the end of a row"):
        to_device(hole, CPU)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_integers_of_any_width_are_a_batch(dtype: torch.dtype) -> None:
    """A loss takes 64 bits alone; 32 ended in a traceback of torch."""
    whole, model = batch(), load("llama")
    narrow = {name: x.to(dtype) for name, x in whole.items()}
    assert model.nll(narrow)[0].equal(model.nll(whole)[0])
    assert keyhole.LOMO(model, lr=1e-3).step(narrow) == keyhole.LOMO(load("llama"), lr=1e-3).step(whole)


def test_a_step_without_a_trained_token_is_warned_of() -> None:
    """Labels that are all masked give a loss of 0; one micro-batch without labels beside others is nothing unusual."""
    masked, usual = batch(seed=0), batch(seed=1)
    masked["labels"] = torch.full_like(masked["labels"], -100)
    masked["labels"][:, 0] = 3  # nothing predicts the first token
    method = keyhole.LOMO(keyhole.load(config("llama"), init="random", dtype="float32"), 1e-2)
    with pytest.warns(UserWarning, match="no token is trained") as found:
        assert float(method.step(masked)) == 0
        method.model.nll(masked)
    assert [warning.filename for warning in found] == [__file__] * 2, "it names the caller's line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.step([masked, usual])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_stays_in_its_row(bad: float) -> None:
    one = to_device(batch(rows=3), torch.device("cpu"))
    nll_N = torch.arange(1.0, one.token_count + 1)
    good_B = one.loss.sum_by_row(nll_N)
    nll_N[one.loss.row_N == 1] = bad
    found_B = one.loss.sum_by_row(nll_N)
    assert torch.equal(found_B[::2], good_B[::2]) and not found_B[1].isfinite()


@given(st.lists(st.integers(2, 5), min_size=1, max_size=6), st.integers(1, 12), st.booleans())
def test_a_split_parts_no_question_and_loses_no_row(sizes: list[int], most: int, by_question: bool) -> None:
    count = sum(sizes)
    one = {"input_ids": torch.arange(count)[:, None], "labels": torch.arange(count)[:, None]}
    if by_question:
        one["question"] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        one["answer"] = torch.cat([torch.eye(size, dtype=torch.long)[0] for size in sizes])
    parts = split(one, most)
    assert torch.equal(torch.cat([part["labels"] for part in parts]), one["labels"])
    longest = max(sizes) if by_question else 1
    assert all(len(part["labels"]) <= max(most, longest) for part in parts)
    if by_question:
        assert all(part["question"][0] == 0 and int(part["answer"].sum()) == part["question"][-1] + 1 for part in parts)
