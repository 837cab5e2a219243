"""The run that the tests of LSP share, the loop it is compared with, and how near they have to be."""

import torch

from keyhole.methods.lsp.method import LSP
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import micro_batches
from tests.model.decoders import load

EPS = 1e-4  # some biases have no gradient but rounding, which Adam would blow up
SMALL = {"d": 16, "r": 4, "check_freq": 3, "alpha": 0.05}
SOON = SMALL | {"check_freq": 2}  # the projectors change in the third step


def train(method: LSP, steps: int, micro: int = 1, first: int = 0) -> list[float]:
    losses = []
    for t in range(first, first + steps):
        method.lr = 1e-2 * (1 - t / 20)
        losses.append(float(method.step(micro_batches(t, micro))))
    method.flush()
    return losses


def torch_adamw(name: str, steps: int, micro: int, clip: float | None) -> dict[str, torch.Tensor]:
    """The weights after the loop anyone would write."""
    module = load(name).module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0, weight_decay=0.1, eps=EPS)
    for t in range(steps):
        plain_loss(module, micro_batches(t, micro)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - t / 20)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.data for key, value in module.named_parameters()}


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """As a whole: single gradients that cancel to nothing are rounding, and Adam makes them large."""
    return float((found - expected).norm()) <= 1e-5 * float(expected.norm().clamp(min=0.02))
