"""Zeroth-order steps in sixteen and eight bits: rounding, wire formats, and the same arithmetic on both devices."""

from typing import Any

import pytest
import torch

import keyhole
from keyhole import ops
from tests.matrix import in_every_run
from tests.methods.zo.loops import EPS, equal, train, weights
from tests.model.decoders import batch, config, load
from tests.model.streaming import streamed

FZOO = {"estimator": "fzoo", "directions": 3, "weight_decay": 0.1, "weight_decay_on": "all"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_streams_exactly(dtype: str) -> None:
    """Stochastic rounding depends on the element, not on where it lives."""
    resident = load(dtype=dtype)
    other = streamed(resident, max_unit_numel=1)
    batches = [batch(seed=1), batch(seed=2, length=6)]
    assert train(resident, 3, batches, directions=2) == train(other, 3, batches, directions=2)
    assert equal(weights(resident), weights(other))


@in_every_run(lambda wire, dtype: dtype == "bfloat16" and wire != "fp16")
@pytest.mark.parametrize("how", [{"directions": 2}, FZOO], ids=["mezo", "fzoo"])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wire_formats_stream_exactly(wire: str, dtype: str, how: dict[str, Any]) -> None:
    """Whatever weights are stored and moved in, streamed equals resident, and what is saved is what was trained."""
    resident, other = load(dtype=dtype, wire=wire), load(dtype=dtype, wire=wire, placement="stream")
    batches = [batch(seed=1), batch(seed=2, length=6)]
    assert train(resident, 3, batches, **how) == train(other, 3, batches, **how)
    assert equal(weights(resident), weights(other))
    assert torch.equal(resident.nll(batches[0])[0], other.nll(batches[0])[0])


def test_fp8_loses_little_of_the_loss() -> None:
    """Blocks in 8 bits give about the loss of the weights they were made from, and halve the bytes of 16 bit."""
    plain, packed = load(dtype="bfloat16", placement="stream"), load(dtype="bfloat16", placement="stream", wire="fp8")
    (a, _), (b, _) = plain.nll(batch()), packed.nll(batch())
    torch.testing.assert_close(a, b, rtol=0.02, atol=0.0)
    blocks = [u for u in plain.layout.units if u.kind == "block"]
    sizes = [sum(m.engine.homes[u.index].nbytes for u in blocks) for m in (plain, packed)]
    assert sizes[1] / sizes[0] == pytest.approx((1 + 1 / 64) / 2)


def test_fp8_goes_on_from_saved_weights_of_ragged_matrices() -> None:
    """24 x 30 is no multiple of 64, so a matrix shares its last scale with padding, which nobody saves."""

    def fresh() -> tuple[keyhole.Model, keyhole.ZO]:
        shape = config("llama", hidden_size=24, intermediate_size=30)
        model = keyhole.load(shape, init="random", device="cpu", dtype="bfloat16", placement="stream", wire="fp8")
        return model, keyhole.ZO(model, lr=0.05, eps=EPS, clip=1.0)

    (through, one), (stopped, two), (again, three) = (fresh() for _ in range(3))
    for t in range(3):
        for opt in (one, two):
            opt.step([batch(seed=t)])
    three.load_state_dict(two.state_dict())
    saved = dict(stopped.named_tensors())
    for tensor in again.layout.tensors:
        again.homes.fill(tensor, lambda p, name=tensor.name: p.copy_(saved[name]))
    for t in range(3, 6):
        for opt in (one, three):
            opt.step([batch(seed=t)])
    assert one.state_dict() == three.state_dict()  # flushed
    assert equal(weights(through), weights(again))


def test_stochastic_rounding_moves_bf16_where_nearest_stalls() -> None:
    """A step far below the spacing of bf16 is made in full on average; rounded to nearest most of it is lost."""
    made = {}
    for rounding in ("stochastic", "nearest"):
        model = load(dtype="bfloat16")
        before = model.engine.homes[2].float()
        opt = keyhole.ZO(model, eps=EPS, rounding=rounding)
        opt.step(batch())
        opt.update.pending.coef.copy_(torch.tensor([1e-6, 1.0]))
        opt.flush()
        z = ops.draw_noise(before.numel(), offset=model.layout.units[2].start, seed=0, step=0)
        made[rounding] = float((before - model.engine.homes[2].float()) @ z / (1e-6 * z @ z))
    assert 0.8 < made["stochastic"] < 1.2
    assert made["nearest"] < 0.5


@pytest.mark.gpu
def test_the_first_update_on_the_gpu_is_that_of_the_cpu() -> None:
    """Noise, arithmetic and rounding agree between devices to the bit, given the same projected gradient."""
    models = [load(dtype="bfloat16", device=device) for device in ("cpu", "cuda")]
    for mine, theirs in zip(models[0].layout.tensors, models[1].layout.tensors, strict=True):
        models[1].home(theirs).copy_(models[0].home(mine))
    for model in models:
        opt = keyhole.ZO(model, eps=EPS, weight_decay=0.1)
        opt.step(batch())
        opt.update.pending.coef.copy_(torch.tensor([1e-3, 0.7]))
        opt.flush()
    assert equal(weights(models[0]), weights(models[1]))
