"""The in-memory MeZO loop as published: the baseline of every table.

One step on the plain HF model, whose parameters are all on the device:

    w += eps z(seed);  L+ = loss;  w -= 2 eps z(seed);  L- = loss;  w += eps z(seed)
    g = (L+ - L-) / (2 eps);       w -= lr g z(seed)

z is drawn tensor by tensor in the parameter's dtype and drawn again from its seed each of the four times, and
w + scale * z makes the temporaries that the published expression makes. The loss is the model's own (`labels=...`).
One thing is done in the baseline's favour: the losses are read after the third pass over w was enqueued, so that
the device does not idle while the host waits for them. `in_place=True` adds z by one in-place kernel instead: a
tuned loop that nobody published, for those who want to know.
"""

import torch
from torch import nn


class Textbook:
    """`step(batch)` like a method of keyhole, on an ordinary HF module."""

    def __init__(
        self, module: nn.Module, lr: float, *, eps: float = 1e-3, seed: int = 0, in_place: bool = False
    ) -> None:
        self.in_place = in_place
        self.module, self.lr, self.eps = module, lr, eps
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.device = self.params[0].device
        self.generator = torch.Generator(self.device)
        self.seeds = torch.Generator().manual_seed(seed)
        self.projected = 0.0

    @torch.no_grad()
    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One step; returns the mean of the two losses, unread."""
        inputs = {name: x.to(self.device) for name, x in batch.items()}
        seed = int(torch.randint(2**31, (), generator=self.seeds))
        self.add_noise(seed, self.eps)
        plus = self.module(**inputs, use_cache=False).loss
        self.add_noise(seed, -2 * self.eps)
        minus = self.module(**inputs, use_cache=False).loss
        self.add_noise(seed, self.eps)
        self.projected = float((plus - minus) / (2 * self.eps))
        self.add_noise(seed, -self.lr * self.projected)
        return (plus + minus) / 2

    def add_noise(self, seed: int, scale: float) -> None:
        """w += scale * z(seed), tensor by tensor."""
        self.generator.manual_seed(seed)
        for param in self.params:
            z = torch.normal(
                0.0, 1.0, param.shape, dtype=param.dtype, device=param.device, generator=self.generator
            )
            if self.in_place:
                param.data.add_(z, alpha=scale)
            else:
                param.data = param.data + scale * z
