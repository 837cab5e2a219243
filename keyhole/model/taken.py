"""The linear layer of linear.py for compiled blocks: its weight gradient is taken in the middle of a compiled reverse.

torch.compile sees two operations it does not look into:

    linear(x, w, b)              y = x w^T + b; its reverse is dx = dy w (an ordinary product), and
    take(dy, x, dx, w)           hands dy and x to whoever takes gradients now; w may be changed in place

`take` has dx as an input although it does not read it: so it cannot run before w was used for dx. Its result is the
"gradient" of an anchor, a tensor of one zero that every linear layer has as an input: so it is not dropped as useless.
The weight itself gets no gradient. Which parameter w is, is told by its address.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Take = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # (w, dy_MO, x_MI)
_takers: list[Take] = []
_anchors: dict[torch.device, torch.Tensor] = {}


@torch.library.custom_op("keyhole::linear", mutates_args=())
def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, anchor: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b)


@_linear.register_fake
def _linear_shape(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, anchor: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@torch.library.custom_op("keyhole::take", mutates_args=())
def _take(dy: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        _takers[-1](w, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
    return torch.zeros(1, device=dy.device)


@_take.register_fake
def _take_shape(dy: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, device=dy.device)


def _setup(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, w, b, _ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = b is not None


def _reverse(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx = dy @ w
    db = dy.flatten(0, -2).sum(dim=0) if ctx.has_bias else None
    return dx, None, db, torch.ops.keyhole.take(dy, x, dx, w)


_linear.register_autograd(_reverse, setup_context=_setup)


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if layer.weight.requires_grad and type(layer) is nn.Linear:
        return torch.ops.keyhole.linear(x, layer.weight, layer.bias, _anchors[x.device])
    return F.linear(x, layer.weight, layer.bias)


@contextmanager
def linears_offer(device: torch.device) -> Iterator[None]:
    """Inside, linear layers are the operations above: for both runs of a compiled block."""
    if device not in _anchors:  # not by the compiled code itself
        _anchors[device] = torch.zeros(1, device=device, requires_grad=True)
    before, nn.Linear.forward = nn.Linear.forward, _forward
    try:
        yield
    finally:
        nn.Linear.forward = before


@contextmanager
def taken_by(take: Take) -> Iterator[None]:
    """Inside, gradients go to `take`: for the reverse of such a block."""
    _takers.append(take)
    try:
        yield
    finally:
        _takers.pop()
        for one in _anchors.values():
            one.grad = None
