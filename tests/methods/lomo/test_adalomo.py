"""AdaLOMO against its own formulas, written out."""

import math

import pytest
import torch

from keyhole.methods.lomo.adalomo import AdaLOMO
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import close, load, micro_batches, rate, weights


@pytest.mark.parametrize("name, clip", [("llama", None), ("llama", 0.1), ("mixtral", 0.1)])
def test_adalomo_equals_its_reference(name: str, clip: float | None) -> None:
    """Each tensor, and each expert of a stack however small, by the textbook formulas from torch's gradients, clipped
    or not; the logged norm is unclipped."""
    model, module = load(name), load(name).module
    opt, states = AdaLOMO(model, weight_decay=0.1, weight_decay_on="all", max_grad_norm=clip), {}
    for t in range(5):
        plain_loss(module, micro_batches(t, 2)).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip or math.inf)
        for name, p in module.named_parameters():
            for e, (w, g) in enumerate(zip(p.data, p.grad, strict=True) if p.dim() == 3 else [(p.data, p.grad)]):
                adalomo_by_the_book(w, g, states.setdefault((name, e), {}), t + 1, lr=rate(t) / 10, weight_decay=0.1)
            p.grad = None
        opt.lr = rate(t) / 10
        opt.step(micro_batches(t, 2))
        assert float(opt.metrics()["grad_norm"]) == pytest.approx(float(norm), rel=1e-4)
    expected = dict(module.named_parameters())
    assert all(close(tensor, expected[name].data, 1e-5) for name, tensor in weights(model).items())


def adalomo_by_the_book(w: torch.Tensor, g: torch.Tensor, state: dict, t: int, lr: float, weight_decay: float) -> None:
    beta = 1 - t**-0.8
    square = g.square() + 1e-30
    if w.dim() == 1:
        state["v"] = beta * state.get("v", 0) + (1 - beta) * square
        u = g / state["v"].sqrt()
    else:
        state["row"] = beta * state.get("row", 0) + (1 - beta) * square.mean(-1, keepdim=True)
        state["col"] = beta * state.get("col", 0) + (1 - beta) * square.mean(-2, keepdim=True)
        u = g / (state["row"] / state["row"].mean() * state["col"]).sqrt()
    u = u / max(1.0, float(u.square().mean().sqrt()))
    step = lr * max(1e-3, float(w.square().mean().sqrt()))
    w.mul_(1 - step * weight_decay).sub_(step * u)
