"""LOMO when something is wrong: numbers that are not finite, a reverse that breaks off, settings, hidden gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole.errors import Mixed, UserError
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.update import Update
from tests.methods.lomo.loops import load, micro_batches, weights


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    """No update; the loss is returned for the run to stop on."""
    model = load()
    dict(model.named_tensors())["model.norm.weight"].fill_(float("nan"))
    before = weights(model)
    assert not torch.isfinite(LOMO(model).step(micro_batches(0, 1)))
    after = weights(model)
    assert all(torch.equal(before[key].nan_to_num(), after[key].nan_to_num()) for key in before)


def test_a_gradient_that_is_not_finite_breaks_the_run() -> None:
    """Met in the middle of a reverse: no later step, and no save, uses those weights."""
    model = load()
    opt = LOMO(model)
    opt.step(micro_batches(0, 1))
    opt.update.tally.bad.fill_(1)
    with pytest.raises(UserError, match="max_grad_norm"):
        opt.flush()
    with pytest.raises(UserError, match="last checkpoint"):
        opt.step(micro_batches(1, 1))


@pytest.mark.parametrize("at", [0, 3])
def test_an_error_in_the_reverse_is_not_silent(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was updated it costs a step; afterwards the weights are of two steps: nobody may use or save
    them."""
    model = load()
    opt, update, updated = LOMO(model), Update.gradient, []
    before, state = weights(model), opt.state_dict()

    def unchanged() -> bool:
        return all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())

    def gradient(self: Update, *args: Any) -> None:
        if len(updated) == at:
            raise torch.OutOfMemoryError("no room")
        updated.append(args[0].name)
        update(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Update, "gradient", gradient)
        with pytest.raises(
            UserError, match=r"(?s)out of GPU memory: no room.*planned for zo .2 x .*a step is lomo .1 x "
        ):
            opt.step(micro_batches(0, 1))
    if at == 0:
        assert unchanged()
        opt.step(micro_batches(0, 1))
        return
    assert not unchanged()
    with pytest.raises(UserError, match="an error came in between.*last checkpoint"):
        opt.step(micro_batches(1, 1))
    with pytest.raises(UserError, match="not usable"):
        opt.flush()
    for write in (lambda: model.save_pretrained(tmp_path), opt.state_dict, lambda: LOMO(model)):
        with pytest.raises(Mixed, match="lomo: .*not usable"):
            write()
    assert not list(tmp_path.iterdir())
    opt.load_state_dict(state)
    opt.flush()


@pytest.mark.parametrize(
    "options, says",
    [
        ({"max_grad_norm": 1.0, "clip_value": 1.0}, "clip_value: contradicts"),
        ({"rounding": "up"}, "stochastic . nearest . kahan"),
        ({"activations": "some"}, "none . block . host"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], says: str) -> None:
    """With what to set instead."""
    with pytest.raises(UserError, match=says):
        LOMO(load(), **options)


def test_what_cannot_be_done_is_refused() -> None:
    """A bare module, fp8 homes, graphs or Kahan with streamed weights, one's own loop with them, a detached loss."""
    away = load(placement="stream")
    for make, says in [
        (lambda: LOMO(load().module), "keyhole.load"),
        (lambda: LOMO(load(placement="stream", wire="fp8")), "packed"),
        (lambda: LOMO(away, activations="none"), "block or host"),
        (lambda: LOMO(away, rounding="kahan"), "stochastic"),
        (lambda: LOMO(away).backward(torch.ones(())), "step"),
        (lambda: LOMO(load()).backward(torch.ones(())), "no graph"),
    ]:
        with pytest.raises(UserError, match=says):
            make()


def test_gradients_that_are_hidden_are_noticed() -> None:
    """A wrapper that detaches everything leaves nothing to update, and the first step says so."""
    model = load()
    decoder = model.head.decoder
    inner = decoder.forward
    decoder.forward = lambda **inputs: (inner(**inputs)[0].detach().requires_grad_(),)
    with pytest.raises(UserError, match="hides"):
        LOMO(model).step(micro_batches(0, 1))
