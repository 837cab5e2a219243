"""The published in-memory MeZO loop: the baseline of every table.

One step on the plain HF model, whose parameters are all on the device:

    w += eps z(seed);  L+ = loss;  w -= 2 eps z(seed);  L- = loss;  w += eps z(seed)
    g = (L+ - L-) / (2 eps);       w -= lr g z(seed)

z is drawn tensor by tensor in the parameter's dtype, and drawn again from its seed each of the four times; the sums
follow MeZO's published code (github.com/princeton-nlp/MeZO, trainer.py), temporaries included. The loss is the model's
own (`labels=...`). One change favours the baseline: the losses are read after the third pass over w was queued, so that
the device does not idle while the host waits for them. `in_place=True` adds z with one in-place kernel instead: a tuned
loop that was not published, for comparison.

The loop runs on the module of a resident keyhole model. Since it gives every parameter its own memory, keyhole's memory
for the weights is freed first (take_weights); otherwise the baseline would be charged for both.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import keyhole
from keyhole.model.structure.layout import FlatTensor
from keyhole.model.weights.random import fill_random


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
        """One step; returns the mean of the two losses, without synchronising."""
        inputs = {name: x.to(self.device) for name, x in batch.items()}
        seed = int(torch.randint(2**31, (), generator=self.seeds))
        self.perturb(seed, 1)
        plus = self.module(**inputs, use_cache=False).loss
        self.perturb(seed, -2)
        minus = self.module(**inputs, use_cache=False).loss
        self.perturb(seed, 1)
        self.projected = float((plus - minus) / (2 * self.eps))
        self.update(seed)
        loss: torch.Tensor = (plus + minus) / 2
        return loss

    def perturb(self, seed: int, sign: int) -> None:
        """w += sign eps z(seed)."""
        for param, z in self._drawn(seed):
            if self.in_place:
                param.data.add_(z, alpha=sign * self.eps)
            else:
                param.data = param.data + sign * z * self.eps

    def update(self, seed: int) -> None:
        """w -= lr g z(seed)."""
        for param, z in self._drawn(seed):
            if self.in_place:
                param.data.add_(z, alpha=-self.lr * self.projected)
            else:
                param.data = param.data - self.lr * (self.projected * z)

    def _drawn(self, seed: int) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        self.generator.manual_seed(seed)
        for param in self.params:
            like: dict[str, Any] = {"dtype": param.dtype, "device": param.device, "generator": self.generator}
            yield param, torch.normal(0.0, 1.0, param.shape, **like)


class _OwnMemory:
    """For fill_random: matrices get their own memory instead of a home. Norms and biases already have it."""

    def __init__(self, model: keyhole.Model) -> None:
        self.layout, self.dtype, self.device = model.layout, model.dtype, model.device
        self.homes = self

    def fill(self, tensor: FlatTensor, write: Callable[[torch.Tensor], None], write_piece: Any = None) -> None:
        if len(tensor.shape) > 1:
            tensor.param.data = torch.empty(tensor.shape, dtype=self.dtype, device=self.device)
            write(tensor.param.data)


def take_weights(model: keyhole.Model, vectors: dict[int, torch.Tensor] | None = None) -> None:
    """Gives the parameters of a resident model their own memory: matrices are drawn as for the model, norms and biases
    keep their values, or get those in `vectors` (by id of the parameter). Afterwards the homes are empty, and only the
    module can be used."""
    std = getattr(model.config, "initializer_range", None) or 0.02
    if any(home.untyped_storage().nbytes() for home in model.engine.homes):
        model.apply_deferred()  # otherwise it would be applied to homes that no longer exist
    if vectors is None:
        vectors = {id(t.param): t.param.data for t in model.layout.tensors if len(t.shape) < 2}
    vectors = {key: value.to(model.device, copy=True) for key, value in vectors.items()}
    model.by_hand.release()
    for tensor in model.layout.tensors:
        tensor.param.data = vectors.get(id(tensor.param), tensor.param.data.new_empty(0))
    for home in model.engine.homes:
        home.untyped_storage().resize_(0)
    fill_random(_OwnMemory(model), std, 0)
