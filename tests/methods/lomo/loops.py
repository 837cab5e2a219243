"""Loops that the tests of LOMO and its relatives share: ours and torch's, over the same micro-batches and rates."""

from functools import lru_cache

import torch

import keyhole
from keyhole.methods.lomo.adalomo import AdaLOMO
from keyhole.methods.lomo.method import LOMO
from tests.methods.baselines.test_first_order import plain_loss
from tests.model.decoders import batch, load

SIX = ["llama", "opt", "gpt2", "gpt_neox", "qwen2", "mixtral"]


def rate(t: int) -> float:
    """A schedule: linear decay from 0.05."""
    return 0.05 * (1 - t / 20)


@lru_cache(maxsize=16)
def torch_sgd(name: str, steps: int, micro: int, clip: float | None, weight_decay: float) -> dict[str, torch.Tensor]:
    """The weights after the loop anyone would write. Do not change them."""
    module = load(name).module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=weight_decay)
    for t in range(steps):
        plain_loss(module, micro_batches(t, micro)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.param_groups[0]["lr"] = rate(t)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.data for key, value in module.named_parameters()}


def micro_batches(t: int, micro: int) -> list:
    return [batch(seed=10 * t + k, length=10 - k) for k in range(micro)]


def train(method: LOMO, steps: int, micro: int = 1, first: int = 0) -> list[float]:
    losses = []
    for t in range(first, first + steps):
        method.lr = rate(t) if isinstance(method, LOMO) and not isinstance(method, AdaLOMO) else rate(t) / 10
        losses.append(float(method.step(micro_batches(t, micro))))
    method.flush()
    return losses


def weights(model: keyhole.Model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_tensors()}


def close(found: torch.Tensor, expected: torch.Tensor, rel: float) -> bool:
    """Within `rel` of the largest element (a bias that softmax ignores is rounding alone, 1e-7 of a gradient)."""
    return float((found - expected).abs().max()) <= rel * max(float(expected.abs().max()), 0.02)
