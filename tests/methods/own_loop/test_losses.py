"""Losses that backward(loss) refuses: of older weights, scaled, of something else, or given twice."""

from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.adam_offload.method import AdamOffload
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import load, micro_batches, weights


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.AdamOffload])
@pytest.mark.parametrize("between", ["backward", "step"])
def test_a_loss_of_older_weights_is_refused(cls: type, between: str) -> None:
    """Its graph would be differentiated at weights that have moved. Torch refuses its own optimizers there, too."""
    model = load("llama")
    method = cls(model, 1e-2)
    one, other = (plain_loss(model.module, micro_batches(t, 1)) for t in (0, 1))
    method.backward(one) if between == "backward" else method.step(micro_batches(0, 1))
    with pytest.raises(UserError, match="the weights have changed since this loss was computed"):
        method.backward(other)
    method.backward(plain_loss(model.module, micro_batches(1, 1)))


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload])
@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (3.0, "found one as a float"),
        (torch.ones(2, requires_grad=True), r"found one of shape \(2,\)"),
        (torch.ones(1, requires_grad=True).sum(), "no weight of this model received a gradient"),
    ],
)
def test_what_is_no_loss_of_the_model_is_refused(cls: type, loss: Any, says: str) -> None:
    """A number, several numbers, or a loss of something else."""
    with pytest.raises(UserError, match=says):
        cls(load("llama"), 1e-2).backward(loss)


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload])
def test_a_loss_that_a_scaler_has_multiplied_is_refused(cls: type) -> None:
    """Its factor, 65536, would be part of the update. A weight of the user's own is a weight, and a scaler that is off
    does nothing."""
    model = load("llama")
    method, scaler = cls(model, 1e-3), torch.amp.GradScaler("cpu")
    for scaled in (scaler.scale, lambda loss: scaler.scale(loss * 0.5)):
        before = weights(model)
        with pytest.raises(UserError, match="a GradScaler has multiplied this loss"):
            method.backward(scaled(plain_loss(model.module, micro_batches(0, 1))))
        assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    off = torch.amp.GradScaler("cpu", enabled=False)
    shares = (lambda loss: loss / 4, lambda loss: loss / torch.tensor(65536.0))  # as many tokens as the scaler's factor
    for kept in (off.scale, lambda loss: loss * torch.tensor(2.0), lambda loss: 65536.0 * loss, *shares):
        method.backward(kept(plain_loss(model.module, micro_batches(0, 1))))


@pytest.mark.parametrize("cls", [keyhole.LOMO, AdamOffload])
def test_a_loss_is_differentiated_once(cls: type) -> None:
    """The second time is refused, and the loop goes on."""
    model = load("llama")
    method = cls(model, 1e-3)
    loss = plain_loss(model.module, micro_batches(0, 1))
    method.backward(loss)
    with pytest.raises(UserError, match=r"differentiated before, .* compute the loss again"):
        method.backward(loss)
    method.backward(plain_loss(model.module, micro_batches(1, 1)))
