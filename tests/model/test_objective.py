"""The loss over candidates: formula, weights of tokens, gradients in chunks of the vocabulary, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import UserError
from keyhole.model.backward.reverse import Reverse
from keyhole.model.batch import check, check_alike, to_device
from keyhole.model.structure import layout as layout_module
from tests.model.backward.gradients import Collect, assert_same, by_autograd, collected, joined, load
from tests.model.candidates import candidate_batch, plain_candidates_loss
from tests.model.decoders import batch

CPU = torch.device("cpu")


@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.integers(0, 10**6))
def test_loss_and_weights_are_those_of_the_formula(sizes: list[int], seed: int) -> None:
    one = candidate_batch(sizes, seed)
    sent = to_device(one, CPU)
    nll_N = 3 * torch.rand(sent.token_count, generator=torch.Generator().manual_seed(seed))
    exact_N = nll_N.double().requires_grad_()
    score_B = torch.stack([-exact_N[sent.loss.row_N == row].mean() for row in range(sent.loss.row_count)])
    parts = [
        -score_B[one["question"] == q].log_softmax(0)[one["answer"][one["question"] == q].argmax()]
        for q in range(len(sizes))
    ]
    expected = torch.stack(parts).sum()
    expected.backward()
    assert sent.loss.count == len(sizes)
    assert float(sent.loss.total(nll_N)) == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(sent.loss.weights(nll_N).double(), exact_N.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [40, 1000], ids=["three chunks", "one chunk"])
@pytest.mark.parametrize("name, tied", [("llama", False), ("llama", True), ("gemma2", True), ("phi", False)])
def test_gradients_equal_autograd(name: str, tied: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "CHUNK_ROWS", rows)
    batches = [candidate_batch([2, 3], 1), candidate_batch([2], 2), candidate_batch([4, 2, 2], 3)]
    model = load(name, tie_word_embeddings=tied)
    assert len(model.layout.head_units) == (3 if rows == 40 else 1)
    expected = by_autograd(model, batches, plain_candidates_loss)
    assert_same(joined(collected(model, batches).found), expected)


def test_a_scaled_loss_scales_every_gradient() -> None:
    """As fp16 needs it: a power of two changes no bit but the exponent."""
    found = []
    for scale in (1.0, 1024.0):
        model, sink = load(), Collect()
        reverse = Reverse(model)
        with reverse.sweep():
            reverse.forward(model.to_device([candidate_batch([2, 3])]))
            reverse.reverse(sink, loss_scale=scale)
        found.append(sink.found)
    assert all(torch.equal(grad * 1024, found[1][key]) for key, grad in found[0].items())


def test_evaluation_stays_per_row() -> None:
    model, one = load(), candidate_batch([2, 3])
    rows = {key: value for key, value in one.items() if key not in ("question", "answer")}
    assert all(torch.equal(a, b) for a, b in zip(model.nll(one), model.nll(rows), strict=True))


def changed(**changes: Any) -> dict[str, Any]:
    return candidate_batch([2, 2]) | changes


NO_TOKEN = candidate_batch([2, 2])["labels"]
NO_TOKEN[2] = -100
NO_TOKEN[2, 0] = 5  # nothing predicts the first token of a row
WRONG = {
    "question alone": {key: value for key, value in changed().items() if key != "answer"},
    "answer is torch.float32": changed(answer=torch.tensor([1.0, 0, 1, 0])),
    r"question is torch.int64 of shape \(2,\)": changed(question=torch.tensor([0, 1])),
    "question is list": changed(question=[0, 0, 1, 1]),
    "must be neighbours": changed(question=torch.tensor([0, 1, 0, 1])),
    "numbered 0, 1, 2": changed(question=torch.tensor([1, 1, 2, 2])),
    "1 for the right candidate and 0 for the others": changed(answer=torch.tensor([2, 0, 1, 0])),
    "question 1 has 2 rows of which 2 are right": changed(answer=torch.tensor([1, 0, 1, 1])),
    "question 0 has 2 rows of which 0 are right": changed(answer=torch.tensor([0, 0, 1, 0])),
    "question 1 has 1 rows": changed(question=torch.tensor([0, 0, 0, 1]), answer=torch.tensor([1, 0, 0, 1])),
    "row 2 has no trained token": changed(labels=NO_TOKEN),
    "position_ids restart": changed(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 4)),
}


@pytest.mark.parametrize("says", WRONG)
def test_what_is_no_choice_is_refused(says: str) -> None:
    one = WRONG[says]
    if "position_ids" in one:
        one["position_ids"] = one["position_ids"][:, : one["input_ids"].shape[1]]
    with pytest.raises(UserError, match=says):
        check(one, 99)


def test_micro_batches_of_two_objectives_are_refused() -> None:
    check_alike([candidate_batch([2]), candidate_batch([3])])
    with pytest.raises(UserError, match="some of 2 micro-batches are trained by candidates"):
        load().to_device([candidate_batch([2]), batch()])
