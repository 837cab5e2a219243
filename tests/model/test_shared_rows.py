"""Candidates that differ in their last token share a row: the same losses from fewer rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyhole
from keyhole.methods.zo.method import ZO
from keyhole.model.batch import to_device
from keyhole.model.rows import find_shared
from tests.model.candidates import candidate_batch, plain_candidates_loss
from tests.model.decoders import VOCAB, config

CPU = torch.device("cpu")
ROWS = ("input_ids", "labels", "attention_mask")
Batch = dict[str, torch.Tensor]


def of_one_token(sizes: list[int], seed: int = 0, length: int = 7) -> Batch:
    """Questions whose candidates have one token each; prompts of 3 to 6 tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    question_B = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    prompt_B = torch.randint(3, 7, (len(sizes),), generator=generator)[question_B]
    ids_BT = torch.randint(3, VOCAB, (len(sizes), length), generator=generator)[question_B].clone()
    columns_T = torch.arange(length)
    ids_BT[torch.arange(rows), prompt_B] = torch.randint(3, VOCAB, (rows,), generator=generator)
    first_B = torch.cat([torch.ones(1, dtype=torch.bool), question_B.diff() > 0])
    mask_BT = (columns_T <= prompt_B[:, None]).long()
    return {
        "input_ids": ids_BT * mask_BT,
        "labels": torch.where(columns_T == prompt_B[:, None], ids_BT, -100),
        "attention_mask": mask_BT,
        "question": question_B,
        "answer": first_B.long(),
    }


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.integers(0, 10**6), st.booleans())
def test_every_target_is_predicted_from_the_same_tokens(sizes: list[int], seed: int, one_token: bool) -> None:
    """For any batch, of short and long candidates: behind each trained position stand the tokens of its own row."""
    batch = of_one_token(sizes, seed) if one_token else candidate_batch(sizes, seed)
    apart, shared = to_device(batch, CPU), to_device(batch, CPU, shares=True)
    for name in ("target_N", "row_N"):
        assert torch.equal(getattr(apart, name), getattr(shared, name))
    assert (apart.row_count, apart.token_count) == (shared.row_count, shared.token_count)
    width = batch["input_ids"].shape[1]
    assert torch.equal(apart.index_N % width, shared.index_N % width)
    for own, other in zip(apart.index_N.tolist(), shared.index_N.tolist(), strict=True):
        (row, end), (place, _) = divmod(own, width), divmod(other, width)
        assert torch.equal(apart.inputs["input_ids"][row, : end + 1], shared.inputs["input_ids"][place, : end + 1])
    if one_token:
        assert len(shared.inputs["input_ids"]) == len(sizes)


def test_equal_questions_stay_apart() -> None:
    """So that the number of rows is the same in every batch; without questions, all equal rows share."""
    batch = of_one_token([2, 2])
    for name in ROWS:
        batch[name][2:] = batch[name][:2]
    assert len(to_device(batch, CPU, shares=True).inputs["input_ids"]) == 2
    rows = {name: batch[name] for name in ROWS}
    assert len(to_device(rows, CPU, shares=True).inputs["input_ids"]) == 1
    assert len(to_device(rows, CPU).inputs["input_ids"]) == 4


@pytest.mark.parametrize("elsewhere", ROWS)
def test_a_batch_that_is_partly_on_a_device_is_not_looked_at(elsewhere: str) -> None:
    batch = of_one_token([2, 2])
    assert find_shared(batch) is not None
    assert find_shared(batch | {elsewhere: batch[elsewhere].to("meta")}) is None


@pytest.mark.parametrize("name", ["llama", "opt", "gemma2"])
def test_losses_are_those_of_separate_rows(name: str) -> None:
    """Of an evaluation, by rows; and of a step of zo, against plain torch on all rows, at both of its points."""
    model = keyhole.load(config(name), init="random", device="cpu")
    batch = of_one_token([2, 3, 2])
    own = torch.tensor(
        [float(model.nll({k: x[i : i + 1] for k, x in batch.items() if k in ROWS})[0]) for i in range(7)]
    )
    torch.testing.assert_close(model.nll(batch)[0].float(), own, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        expected = float(plain_candidates_loss(model.module, [batch]))
    loss = float(ZO(model, lr=0.0, eps=1e-6, seed=3).step(batch))
    assert loss == pytest.approx(expected, abs=1e-5)
