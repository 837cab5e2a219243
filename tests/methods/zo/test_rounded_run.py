"""Updates that are rounded to 8 bits: how much noise they leave, and that nobody makes a long run of them unawares."""

import math
import warnings

import pytest
import torch

import keyhole
from keyhole.methods.zo.update import Pending
from tests.model.decoders import batch, load


def matrices(model: keyhole.Model) -> torch.Tensor:
    """All of the blocks, flat."""
    blocks = {id(t) for unit in model.layout.of_kind("block") for t in unit.tensors if len(t.shape) == 2}
    pairs = zip(model.layout.tensors, model.named_tensors(), strict=True)
    return torch.cat([w.flatten().double() for tensor, (_, w) in pairs if id(tensor) in blocks])


def test_the_noise_is_what_the_essay_says() -> None:
    """The same updates on weights in 8 bits and in 32: what sets them apart after T steps is 0.07 T E|u| / |w| of the
    energy, to a fifth."""
    steps, size = 50, 2e-5
    updates = [Pending(torch.tensor([size, 1.0]), step) for step in range(steps)]
    moved = []
    for wire in ("fp8", "fp32"):
        model = load(wire=wire)
        before = matrices(model).clone()
        method = keyhole.ZO(model, size, seed=1)
        method.replay(updates)
        moved.append(matrices(model) - before)
    energy = float(before.square().mean())
    share = float((moved[0] - moved[1]).square().mean()) / energy
    assert share == pytest.approx(0.07 * steps * size * math.sqrt(2 / math.pi) / math.sqrt(energy), rel=0.2)


def test_a_loop_of_ones_own_is_warned_once() -> None:
    """At the step that is one too many; with kept factors, or in other formats, never."""
    method = keyhole.ZO(load(wire="fp8"), 1e-5, fp8_steps=2)
    for step in range(4):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            method.step(batch(seed=step))
        assert [w for w in found if "fp8 rounds every update" in str(w.message)] == found and len(found) == (step == 2)
    for how in ({"wire": "fp8", "rank": 2, "fold": False}, {"wire": "bf16"}):
        other = keyhole.ZO(load(wire=how.pop("wire")), 1e-5, fp8_steps=1, **how)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(2):
                other.step(batch(seed=step))
