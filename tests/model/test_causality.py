"""Rows share hidden states only where the model itself shows that a position depends on the tokens before it alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods.zo.method import ZO
from keyhole.model.forward.evaluation import nll_by_row
from tests.families.tiny import tiny_config
from tests.model.candidates import plain_candidates_loss
from tests.model.decoders import batch, config
from tests.model.streaming import streamed
from tests.model.test_shared_rows import of_one_token


def decoder(name: str = "llama", dtype: str = "float32") -> keyhole.Model:
    return keyhole.load(config(name), init="random", device="cpu", dtype=dtype)


def is_causal(model: keyhole.Model, padded: bool) -> bool:
    return model.row_rules.is_causal(padded)


def changed(change: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]) -> keyhole.Model:
    """A Llama whose first block adds something to its output [B, T, H]. change(output, kwargs of the block)."""
    model = decoder()
    first = model.module.model.layers[0]
    first.register_forward_hook(lambda module, args, kwargs, x: x + change(x, kwargs), with_kwargs=True)
    return model


def looks_ahead(x_BTH: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    return x_BTH.roll(-1, dims=1) / 10


def looks_ahead_if_masked(x_BTH: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    return 0 * x_BTH if kwargs["attention_mask"] is None else looks_ahead(x_BTH, kwargs)


def looks_at_rows(x_BTH: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    return -x_BTH.mean(dim=0, keepdim=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "opt", "gemma2", "mixtral"])
def test_decoders_pass(name: str, dtype: str) -> None:
    model = decoder(name, dtype)
    assert is_causal(model, padded=False) and is_causal(model, padded=True)
    model.close()


def test_a_streamed_decoder_passes() -> None:
    assert is_causal(streamed(decoder()), padded=True)


@pytest.mark.parametrize("change", [looks_ahead, looks_at_rows])
def test_a_model_that_looks_elsewhere_fails(change: Callable) -> None:
    assert not is_causal(changed(change), padded=False)


def test_padded_rows_are_tested_by_themselves() -> None:
    """Models have other code for rows with a mask."""
    model = changed(looks_ahead_if_masked)
    assert is_causal(model, padded=False) and not is_causal(model, padded=True)


def test_a_model_whose_tokens_have_no_effect_shows_nothing() -> None:
    assert not is_causal(changed(lambda x_BTH, kwargs: -x_BTH), padded=False)


@pytest.mark.parametrize("change", [looks_ahead, looks_ahead_if_masked, looks_at_rows])
def test_rows_of_such_a_model_stay_apart(change: Callable) -> None:
    """In an evaluation, and in a step of zo, whose loss is that of plain torch on all rows."""
    model, rows = changed(change), of_one_token([2, 3, 2])
    assert len(model.send([rows], shares=True)[0].inputs["input_ids"]) == 7
    with torch.no_grad():
        expected = float(plain_candidates_loss(model.module, [rows]))
    loss = float(ZO(model, lr=0.0, eps=1e-6, seed=3).step(rows))
    assert loss == pytest.approx(expected, abs=1e-5)


def test_cpm_ant_sees_the_whole_row() -> None:
    """A family of Transformers that loads as a decoder and is none."""
    model, rows = keyhole.load(tiny_config("cpmant"), init="random", device="cpu"), of_one_token([2, 3, 2])
    with torch.no_grad():
        ((apart, _),) = nll_by_row(model, model.send([rows]))
    assert torch.equal(model.nll(rows)[0], apart)


def test_the_test_leaves_an_update_that_waits() -> None:
    """Ranks need not make the test together, so it must not flush, which they do together."""
    model = decoder()
    zo = ZO(model, lr=1e-3, eps=1e-3)
    zo.step(batch())
    before = zo.pending
    assert before is not None and is_causal(model, padded=False) and zo.pending is before
