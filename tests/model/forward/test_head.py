"""The head by itself: the model's own code after the decoder, on any rows of the vocabulary."""

import pytest
import torch
from torch.nn import functional as F

import keyhole
from keyhole.ops.loss import RunningNLL
from tests.model.decoders import NAMES, VOCAB, batch, config, load


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_rows_of_the_head_give_their_logits(name: str) -> None:
    model, ids = load(name), batch()["input_ids"]
    head = model.head
    logits_NV = model.module(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    hidden_NH = head.decoder(input_ids=ids, use_cache=False)[0].flatten(0, 1)
    torch.testing.assert_close(head.logits(hidden_NH), logits_NV, rtol=1e-5, atol=1e-5)
    weight, bias = head.linear.weight.data, head.linear.bias
    bias = None if bias is None else bias.data
    for first, last in ((0, 40), (40, VOCAB)):
        head.bind(weight[first:last], None if bias is None else bias[first:last])
        torch.testing.assert_close(head.logits(hidden_NH), logits_NV[:, first:last], rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(head.decoder)  # the stand-in is gone


def test_loss_with_gradients_is_cross_entropy() -> None:
    model = load("gemma2")
    hidden_NH = torch.randn(20, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    target_N = torch.arange(20)
    loss = model.head.loss_sum(hidden_NH, target_N, tokens=6)
    expected = F.cross_entropy(model.head.logits(hidden_NH), target_N, reduction="sum")
    weight = model.head.linear.weight
    for a, b in zip(
        torch.autograd.grad(loss, (hidden_NH, weight)), torch.autograd.grad(expected, (hidden_NH, weight)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, expected)
    with torch.no_grad():
        torch.testing.assert_close(model.head.loss_sum(hidden_NH, target_N, tokens=6), expected)
        running = RunningNLL(target_N)
        model.head.add_nll(running, hidden_NH, 0, tokens=6)  # slices of tokens, here too
        torch.testing.assert_close(running.nll_N().sum(), expected)


@pytest.mark.gpu
def test_losses_of_rows_have_the_same_bits_every_time() -> None:
    model = keyhole.load(config("llama"), init="random", device="cuda", dtype="float32")
    ids = torch.randint(5, 90, (4, 512), generator=torch.Generator().manual_seed(0))
    found = [model.nll({"input_ids": ids, "labels": ids})[0].tolist() for _ in range(20)]
    assert all(one == found[0] for one in found)
