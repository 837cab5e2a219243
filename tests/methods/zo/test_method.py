"""Zeroth-order steps at the edges: clipping, nothing to train, rates that are none. (Textbook: test_estimators.py.)"""

import gc
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from tests.methods.zo.loops import EPS, train
from tests.model.decoders import batch, load


def test_it_learns() -> None:
    """On one batch, the loss falls."""
    model = load()
    losses = train(model, 10, [batch()], lr=1e-2, directions=2, distribution="rademacher")
    assert losses[-1] < losses[0] - 0.1


def test_clip_bounds_the_projected_gradient() -> None:
    """|g| is at most `clip`, and the update is that of the clipped g."""
    model = load()
    opt = keyhole.ZO(model, lr=1e-3, eps=EPS, clip=1e-3)
    opt.step(batch())
    assert opt.metrics()["projected_grad"] == pytest.approx(1e-3)


def test_everything_frozen_is_refused() -> None:
    """A model with nothing to train is the user's mistake."""
    model = load()
    model.module.requires_grad_(False)
    with pytest.raises(UserError, match="frozen"):
        keyhole.ZO(model)


@pytest.mark.parametrize("lr", [float("nan"), -1.0, float("inf"), "1e-3"])
def test_what_is_no_learning_rate_is_refused(lr: Any) -> None:
    for method in (keyhole.ZO, keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload):
        with pytest.raises(UserError, match="lr: .* is no learning rate"):
            method(load(), lr)


@pytest.mark.parametrize("wire", [None, "fp8"])
def test_a_second_method_finds_the_memory_of_the_first_free(wire: str | None) -> None:
    """Buffers of a method that is gone are not kept alive by what the model remembers of them."""
    model = load("opt", placement="stream", wire=wire)
    first = keyhole.ZO(model, 1e-3)
    first.step(batch())
    memory = first.directions.copies[0].untyped_storage()
    assert torch._C._storage_Use_Count(memory._cdata) > 1
    del first
    second = keyhole.ZO(model, 1e-3)
    gc.collect()
    assert torch._C._storage_Use_Count(memory._cdata) == 1 and second.directions.copies
