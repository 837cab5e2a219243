"""Seeded random weights, fast: what benchmarks and tests need when only a config exists.

Vectors (norms, biases) keep what the HF model's own initialisation gave them; they are tiny. Matrices are drawn from
N(0, initializer_range^2). On a GPU a chunk is drawn there and copied home, at the speed of the link. On a CPU drawing
costs about 10 ns an element, so above POOLED_NUMEL elements a tensor is filled from one pool of normals, read from a
place that depends on the tensor: fine for timing, and said in the start block.
"""

import torch

from keyhole.model.layout import FlatTensor

CHUNK = 1 << 26
POOLED_NUMEL = 1 << 28


def fill_random(tensors: list[FlatTensor], homes: list[torch.Tensor], std: float, seed: int, device: torch.device) -> None:
    """Fills homes[i], the home of tensors[i]. The values depend on the seed and the device type alone."""
    generator = torch.Generator(device).manual_seed(seed)
    total = sum(t.shape.numel() for t in tensors)
    pool = None
    if device.type == "cpu" and total > POOLED_NUMEL:
        pool = torch.empty(CHUNK).normal_(0.0, std, generator=generator)
    for tensor, home in zip(tensors, homes, strict=True):
        if len(tensor.shape) < 2:
            home.copy_(tensor.param.data)
            continue
        for i, part in enumerate(home.view(-1).split(CHUNK)):
            if pool is None:
                drawn = torch.empty(part.numel(), device=device).normal_(0.0, std, generator=generator)
            else:
                shift = (tensor.start + i * (CHUNK + 1)) * 2654435761 % CHUNK
                drawn = torch.roll(pool, shift)[: part.numel()]
            part.copy_(drawn)
