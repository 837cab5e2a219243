"""The norm of the whole gradient has the same bits in whatever order gradients come."""

import random

import pytest
import torch

from keyhole.methods.lomo.adalomo import AdaLOMO
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lomo.update import Now, Tally
from tests.matrix import in_every_run
from tests.methods.lomo.loops import load


@in_every_run(lambda name, method: (name == "opt") == (method is LOMO))
@pytest.mark.parametrize("method", [LOMO, AdaLOMO])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_the_order_of_gradients_changes_no_bit(name: str, method: type) -> None:
    """Of the sink that only measures, and of the one that updates."""
    norms: dict[bool, set[float]] = {True: set(), False: set()}
    for seed in range(12):
        model = load(name)
        opt = method(model)
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(t.shape, generator=generator) * 10 ** (i % 5) for i, t in enumerate(model.layout.tensors)]
        pairs = list(zip(model.layout.tensors, drawn, strict=True))
        random.Random(seed).shuffle(pairs)
        for measures in (True, False):
            opt.update.tally.zero_()
            opt.update.begin(Now(step=1, only_norm=measures))
            for tensor, grad in pairs:
                opt.update.gradient(tensor, tensor.param.data, grad)
            norms[measures].add(float(opt.update.tally.norm()))
    expected = float(torch.stack([grad.double().square().sum() for grad in drawn]).sum().sqrt())
    assert len(norms[True]) == len(norms[False]) == 1
    assert all(found == pytest.approx(expected, rel=1e-6) for one in norms.values() for found in one)


def test_places_of_chunks_and_pieces() -> None:
    """Some elements of a tensor, as a rank has them, are added to the tensor's place."""
    from dataclasses import replace

    layout = load("llama").layout
    tally = Tally(layout, torch.device("cpu"))
    for tensor in layout.tensors:
        piece = replace(tensor, start=tensor.start + tensor.shape.numel() // 2)
        tally.squares_of(tensor).add_(1.0)
        tally.squares_of(piece).add_(1.0)
    tally.extra.add_(3.0)
    assert float(tally.norm()) ** 2 == pytest.approx(2 * len(layout.tensors) + 3)
    assert tally.sums[:-1].max() == 2.0
