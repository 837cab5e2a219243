"""LOMO in sixteen bits: where small steps go, how float16 scales its loss, and that a stopped run loses none of it."""

import torch

from keyhole.methods.lomo.method import LOMO, LossScale
from tests.methods.lomo.loops import load, micro_batches, weights


def test_a_float32_home_beats_sixteen_bits() -> None:
    """wire=fp32: small steps add up in fp32 where nearest rounding loses all of them."""
    moved = {}
    for key, options in {"home": {"wire": "fp32"}, "nearest": {}}.items():
        model = load(dtype="bfloat16", **options)
        before = {n: t.clone() for n, t in model.named_tensors()}
        opt = LOMO(model, lr=1e-6, rounding="nearest")
        for t in range(4):
            opt.step(micro_batches(t, 1))
        matrix = "model.layers.0.mlp.up_proj.weight"
        moved[key] = float((dict(model.named_tensors())[matrix].float() != before[matrix].float()).float().mean())
    assert moved["home"] > 0.7 and moved["nearest"] < 0.1


def test_float16_scales_its_loss() -> None:
    """Overflow changes nothing but the scale; after that it trains."""
    model = load(dtype="float16")
    opt = LOMO(model, lr=1e-2)
    opt.loss_scale.scale = 2.0**40
    before = weights(model)
    opt.step(micro_batches(0, 1))
    assert opt.loss_scale.scale == 2.0**39 and not torch.isfinite(opt.metrics()["grad_norm"])
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())
    opt.loss_scale.scale = LossScale.FIRST
    opt.step(micro_batches(0, 1))
    assert torch.isfinite(opt.metrics()["grad_norm"]) and opt.step_count == 1


def test_the_loss_scale_grows_again() -> None:
    """Doubled after INTERVAL good steps in a row; its count survives a checkpoint."""
    first, other = (LOMO(load(dtype="float16")) for _ in range(2))
    for _ in range(LossScale.INTERVAL - 1):
        first.loss_scale.update(True)
    other.load_state_dict(first.state_dict())
    other.loss_scale.update(True)
    assert other.loss_scale.scale == 2 * LossScale.FIRST and first.loss_scale.scale == LossScale.FIRST
