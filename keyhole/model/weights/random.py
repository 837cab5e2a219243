"""Seeded random weights, fast: for benchmarks and tests, if only a config exists.

Vectors (norms, biases) keep the values of the HF model's own initialisation. Matrices are drawn from
N(0, initializer_range^2). On a GPU a chunk is drawn there and copied home, at the speed of the link. On a CPU drawing
costs about 10 ns per element, so a model of more than POOLED_NUMEL elements is filled from one pool of normals, with an
offset that depends on the tensor: good enough for timing.
"""

from typing import Any

import torch

from keyhole.model.structure.layout import FlatTensor

CHUNK = 1 << 22  # elements drawn at a time: 16 MiB, so that a budget of GPU memory has room for them
POOLED_NUMEL = 1 << 28


def fill_random(model: Any, std: float, seed: int, only: list[FlatTensor] | None = None) -> None:
    """Fills a Model (or refills it: vectors then stay); its values depend only on the seed and the type of device.
    only: fills these tensors, with values that depend on the seed alone."""
    device = model.device if only is None else torch.device("cpu")
    tensors = model.layout.tensors if only is None else only
    generator = torch.Generator(device).manual_seed(seed)
    total = sum(t.shape.numel() for t in tensors)
    pool = None
    if device.type == "cpu" and total > POOLED_NUMEL:
        pool = torch.empty(CHUNK).normal_(0.0, std, generator=generator)
    for tensor in tensors:
        if len(tensor.shape) < 2:
            model.homes.fill(tensor, lambda target, tensor=tensor: target.copy_(tensor.param.data))
            continue

        def draw(target: torch.Tensor, begin: int = 0, tensor: FlatTensor = tensor) -> None:
            for i, part in enumerate(target.view(-1).split(CHUNK), start=begin // CHUNK):
                if pool is None:
                    drawn = torch.empty(part.numel(), device=device).normal_(0.0, std, generator=generator)
                else:
                    place = (tensor.start + i * CHUNK) * 0x9E3779B97F4A7C15 % 2**64  # the high bits are scattered
                    drawn = torch.roll(pool, (place >> 32) % CHUNK)[: part.numel()]
                part.copy_(drawn.to(part.dtype))  # converted on the device: copy_ would convert on the host, slowly

        model.homes.fill(tensor, draw, draw)
