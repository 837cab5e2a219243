"""The matrix products of a first-order step, and nothing else, one after the other with the model's own weights.

    forward     y = x W^T               every linear layer; the head's once more, since its logits are made twice
    again       y = x W^T               blocks from the last to the first, if only their inputs are kept; without the
                                        last layer, whose output is not needed
    backward    dx = dy W, dW = dy^T x  every linear layer, from the last to the first

One large product of a fresh GPU is a floor that no step reaches: the products of a model have other shapes, and a GPU
that multiplies without a pause is held at its power limit, where its clock is lower. So the same number of rounds as
there were steps is timed directly after them.
"""

from typing import Any

import torch
from torch import nn

from keyhole.bench import measure
from keyhole.bench.gradient.report import gradient_share, recomputes
from keyhole.model.structure.find import find_blocks


def own_products_s(trial: dict[str, Any], module: nn.Module, tokens: int, warm_up: int, rounds: int) -> float | None:
    """Seconds per step, for all micro-batches. None if the weights are not all on the device, or the method computes
    other products (adapters, subspaces)."""
    if trial["streamed"] or trial["gpu_memory"] or gradient_share(trial) != 1.0:
        return None
    blocks = [
        [layer.weight for layer in block.modules() if isinstance(layer, nn.Linear)] for block in find_blocks(module)
    ]
    inside = {id(weight) for block in blocks for weight in block}
    outside = [
        layer.weight for layer in module.modules() if isinstance(layer, nn.Linear) and id(layer.weight) not in inside
    ]
    first = blocks[0][0]
    shapes = {weight.shape for weight in (*outside, *(weight for block in blocks for weight in block))}
    rows = {
        size: torch.randn(tokens, size, device=first.device, dtype=first.dtype)
        for size in {n for s in shapes for n in s}
    }

    def forward(weights: list[torch.Tensor]) -> None:
        for weight in weights:
            torch.mm(rows[weight.shape[1]], weight.t())

    def backward(weights: list[torch.Tensor]) -> None:
        for weight in reversed(weights):
            torch.mm(rows[weight.shape[0]], weight)
            torch.mm(rows[weight.shape[0]].t(), rows[weight.shape[1]])

    def step() -> None:
        for block in blocks:
            forward(block)
        forward(outside)
        forward(outside)
        backward(outside)
        for block in reversed(blocks):
            if recomputes(trial):
                forward(block[:-1])
            backward(block)

    with torch.no_grad():
        found = measure.time_parts({"products": step}, first.device, warm_up, rounds)
    return float(trial["micro_batches"] * found["products"]["s"])
