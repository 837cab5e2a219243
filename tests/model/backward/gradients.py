"""Gradients of a tiny decoder twice: by a reverse with a sink that collects them, and by plain autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import keyhole
from keyhole.model.backward.reverse import Reverse
from keyhole.model.backward.sink import Sink
from keyhole.model.structure.layout import FlatTensor, Unit
from tests.model.decoders import config

Gradients = dict[str, torch.Tensor]


def load(name: str = "llama", **changes: Any) -> keyhole.Model:
    return keyhole.load(config(name, **changes), init="random", device="cpu")


class Collect(Sink):
    """A sink that keeps every gradient by the name of its tensor. accepts: whether it takes offers of linear layers."""

    def __init__(self, accepts: bool = True, accumulates: bool = False) -> None:
        self.accepts, self.accumulates = accepts, accumulates
        self.found: Gradients = {}
        self.offers = 0
        self.finished_units: list[str] = []

    def linear(self, tensor: FlatTensor, w_OI: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor) -> bool:
        self.offers += 1
        if self.accepts:
            before = self.found.get(tensor.name, 0)
            assert self.accumulates or tensor.name not in self.found, f"{tensor.name} was handed over twice"
            self.found[tensor.name] = before + dy_MO.t() @ x_MI
        return self.accepts

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        assert tensor.name not in self.found and w.shape == grad.shape == tensor.shape
        self.found[tensor.name] = grad.clone()

    def finished(self, unit: Unit) -> bool:
        self.finished_units.append(unit.name)
        return False


def collected(model: keyhole.Model, batches: list, sink: Collect | None = None, **options: Any) -> Collect:
    """One forward and one reverse."""
    sink, reverse = sink or Collect(), Reverse(model, **options)
    with reverse.sweep():
        reverse.forward(model.to_device(batches))
        reverse.reverse(sink)
    return sink


def token_loss(module: torch.nn.Module, batches: list) -> torch.Tensor:
    """The mean over all trained tokens of all batches, from the full logits."""
    total, count = torch.zeros(()), 0
    for one in batches:
        logits_BTV = module(input_ids=one["input_ids"], use_cache=False).logits[:, :-1].float()
        targets_BT = one["labels"][:, 1:]
        total = total + F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        count += int((targets_BT != -100).sum())
    return total / count


def by_autograd(model: keyhole.Model, batches: list, loss: Callable[..., torch.Tensor] = token_loss) -> Gradients:
    with torch.enable_grad():
        loss(model.module, batches).backward()
    found = {t.name: t.param.grad for t in model.layout.tensors if t.param.grad is not None}
    model.module.zero_grad(set_to_none=True)
    return found


def joined(found: Gradients) -> Gradients:
    """Chunks of tables (`name[first:last]`) put together, in the order of their rows."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, grad in found.items():
        name, _, rows = name.partition("[")
        parts.setdefault(name, []).append((int(rows.partition(":")[0] or 0), grad))
    return {name: torch.cat([g for _, g in sorted(chunks, key=lambda c: c[0])]) for name, chunks in parts.items()}


def assert_same(found: Gradients, expected: Gradients) -> None:
    """The same tensors, each within rounding of the largest gradient."""
    largest = max(float(grad.abs().max()) for grad in expected.values())
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}")
