"""ZO.step(closure): any number that can be computed from the model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from tests.methods.lomo.loops import weights

IDS = torch.randint(5, 200, (3, 10), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}


def loaded(model: Path, **how: Any) -> keyhole.Model:
    return keyhole.load(str(model), device="cpu", **how)


def mean_nll(model: keyhole.Model) -> torch.Tensor:
    nll_B, count_B = model.nll(BATCH)
    return nll_B.sum() / count_B.sum()


@pytest.mark.parametrize("how", [{}, {"placement": "stream"}, {"placement": "stream", "wire": "fp8"}])
@pytest.mark.parametrize("directions", [1, 2])
def test_the_mean_loss_as_a_closure_is_the_step_on_the_batch(
    tiny_model: Path, how: dict[str, Any], directions: int
) -> None:
    """Same noise, same losses up to the order of sums; homes are untouched while the closure looks."""
    one, other = loaded(tiny_model, **how), loaded(tiny_model, **how)
    a, b = (keyhole.ZO(model, 1e-3, directions=directions, seed=7) for model in (one, other))
    for _ in range(1 if "wire" in how else 3):  # a last bit of g decides how weights of 8 bits are rounded
        assert float(a.step(lambda: mean_nll(one))) == pytest.approx(float(b.step(BATCH)), rel=1e-5)
        assert a.projected.tolist() == pytest.approx(b.projected.tolist(), rel=2e-2, abs=2e-3)
    if "wire" not in how:
        ours, theirs = weights(one), weights(other)
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


def test_other_estimators_take_closures(tiny_model: Path) -> None:
    one, other = loaded(tiny_model), loaded(tiny_model)
    a, b = (keyhole.ZO(model, 1e-3, estimator="fzoo", directions=3, seed=7) for model in (one, other))
    assert float(a.step(lambda: mean_nll(one))) == pytest.approx(float(b.step(BATCH)), rel=1e-5)


def test_streamed_equals_resident_to_the_bit(tiny_model: Path) -> None:
    """A closure that generates and counts: no gradient could do that."""

    def run(**how: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = loaded(tiny_model, **how)
        opt, losses = keyhole.ZO(model, 1e-2, eps=0.3, seed=2), []
        for _ in range(3):

            def wrong() -> float:
                made = model.generate(BATCH["input_ids"], max_new_tokens=3, do_sample=False)
                return float((made[:, -3:] != 7).float().mean()) + float(mean_nll(model))

            losses.append(float(opt.step(wrong)))
        return losses, weights(model)

    (first, a), (second, b) = run(), run(placement="stream")
    assert first == second and all(torch.equal(a[name], b[name]) for name in a)


def test_logits_of_a_decoder_are_the_modules_own(tiny_model: Path) -> None:
    """An accuracy from the logits, streamed and seen through the noise of a step; outside of it, the module's bits."""
    model, streamed = loaded(tiny_model), loaded(tiny_model, placement="stream")
    with torch.no_grad():
        theirs = model.module(**{name: x for name, x in BATCH.items() if name != "labels"}).logits
    assert torch.equal(model.logits(BATCH), theirs) and torch.equal(streamed.logits(BATCH), theirs)
    (listed,) = streamed.logits([BATCH])
    assert torch.equal(listed, theirs)

    def run(model: keyhole.Model) -> tuple[float, list[float]]:
        opt, seen = keyhole.ZO(model, 1e-2, eps=0.3, seed=2), []

        def wrong() -> torch.Tensor:
            seen.append(float(model.logits(BATCH).double().sum()))
            return (model.logits(BATCH)[:, :-1].argmax(-1) != BATCH["labels"][:, 1:]).float().mean()

        return float(opt.step(wrong)), seen

    (loss, seen), other = run(model), run(streamed)
    assert (loss, seen) == other and len(set(seen)) == 2, "both sides are seen"


def test_what_cannot_be_done_is_said(tiny_model: Path) -> None:
    """Not by an AttributeError: a method without backward(loss), and a text where tokens are expected."""
    model = loaded(tiny_model)
    with pytest.raises(UserError, match=r"ZO has no backward\(loss\): give the batch to step\(batch\)"):
        keyhole.ZO(model, 1e-3).backward(torch.zeros(()))
    with pytest.raises(UserError, match="input_ids: found a str, expected the tokens"):
        model.generate("Once upon")


def test_the_closure_sees_both_sides_and_the_update_follows_their_difference(tiny_model: Path) -> None:
    """It is called twice per direction on different weights; a constant loss moves nothing, nan neither."""
    model = loaded(tiny_model)
    opt, seen = keyhole.ZO(model, 1e-2, directions=2), []
    before = weights(model)
    opt.step(lambda: seen.append(float(mean_nll(model))) or 1.0)
    opt.flush()
    assert len(set(seen)) == 4 and all(torch.equal(before[name], now) for name, now in weights(model).items())
    opt.step(lambda: float("nan"))
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    assert opt.step_count == 2


def test_what_cannot_be_a_loss_is_refused(tiny_model: Path) -> None:
    """What is no number, and what does not see the perturbed weights (the module's own forward, a part of it, weights
    that are read, a number from outside): every step would find a slope of 0. The model is as before."""
    model = loaded(tiny_model)
    opt, start = keyhole.ZO(model, 1e-3), weights(model)
    for closure, says in (
        (lambda: "x", "found a str"),
        (lambda: torch.zeros(2), "shape"),
        (lambda: None, "NoneType"),
        (lambda: opt.step(lambda: 1.0), "do not nest"),
        (lambda: keyhole.LOMO(model, 1e-3).step(BATCH), "closure: steps do not nest"),
        (lambda: model.module(**BATCH).loss, "the module's own forward does not see the perturbed weights"),
        (lambda: 3.0, "evaluated nothing at the perturbed weights"),
        (lambda: model.module.lm_head(torch.ones(1, model.config.hidden_size)).sum(), "evaluated nothing"),
        (lambda: sum(float(param.detach().sum()) for param in model.module.parameters()), "evaluated nothing"),
    ):
        with pytest.raises(UserError, match=says):
            opt.step(closure)
    assert model.device_weights.replacement is None and all(
        torch.equal(start[name], one) for name, one in weights(model).items()
    )
    assert opt.step_count == 0 and torch.isfinite(opt.step(BATCH))
    opt.step(lambda: mean_nll(model))


@pytest.mark.parametrize("how", [{}, {"placement": "stream"}])
def test_the_module_by_itself_has_the_last_update(tiny_model: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    """Called or saved after a step whose update is deferred."""
    from transformers import AutoModelForCausalLM

    model = loaded(tiny_model, **how)
    opt = keyhole.ZO(model, 1e-2)
    opt.step(BATCH)
    model.module.save_pretrained(tmp_path)
    opt.step(BATCH)
    opt.step(BATCH)
    called = float(model.module(**BATCH).loss)
    assert called == pytest.approx(float(mean_nll(model)), abs=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    twin = loaded(tiny_model)
    keyhole.ZO(twin, 1e-2).step(BATCH)
    assert float(saved(**BATCH).loss) == pytest.approx(float(mean_nll(twin)), abs=1e-5)


def test_factors_beside_the_weights_are_not_left_out(tiny_model: Path, tmp_path: Path) -> None:
    """The module adds them where nothing is differentiated, and cannot save them."""
    model = loaded(tiny_model)
    keyhole.ZO(model, 1e-2, rank=2).step(BATCH)
    with torch.no_grad():
        assert float(model.module(**BATCH).loss) == pytest.approx(float(mean_nll(model)), abs=1e-5)
    for use in (lambda: model.module(**BATCH), lambda: model.module.save_pretrained(tmp_path)):
        with pytest.raises(UserError, match="the weights lack the low-rank factors"):
            use()
