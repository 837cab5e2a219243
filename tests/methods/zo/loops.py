"""The run that the tests of zeroth-order steps share, and what they compare after it."""

from typing import Any

import torch

import keyhole
from tests.model.decoders import batch

EPS, SEED = 1e-2, 7


def weights(model: keyhole.Model) -> list[torch.Tensor]:
    return [tensor.detach().clone() for _, tensor in model.named_tensors()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


def train(
    model: keyhole.Model, steps: int, batches: list | None = None, lr: float = 1e-3, **options: Any
) -> list[float]:
    """Steps with a falling learning rate; returns the losses, and leaves nothing pending."""
    opt = keyhole.ZO(model, **{"eps": EPS, "seed": SEED, **options})
    losses = []
    for t in range(steps):
        opt.lr = lr * (1 - t / 40)
        losses.append(opt.step(batches or [batch(seed=t)]))
    opt.flush()
    return [loss.item() for loss in losses]


def check_one_visit(model: keyhole.Model, opt: keyhole.ZO, batches: list) -> None:
    """A settled step moves every streamed float32 unit over the link once, up and down."""
    for _ in range(2):
        opt.step(batches)
    up, down = model.engine.bytes_up, model.engine.bytes_down
    opt.step(batches)
    size = sum(model.layout.units[i].numel for i in model.engine.streamed) * 4
    assert (model.engine.bytes_up - up, model.engine.bytes_down - down) == (size, size)
