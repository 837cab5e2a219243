"""The linear layer of recompute.py for compiled blocks: it offers its gradient inside a compiled backward pass.

torch.compile sees two opaque custom operations:

    linear(x, w, b)              y = x w^T + b
    linear_reverse(dy, x, w)     dx = dy w; then dy and x go to the current receiver, and w may change in place

The backward is one operation, so that w cannot change before dx has been computed from it. It is declared to mutate w:
otherwise the compiler could move another read of w, the product of the block's recomputation, behind it. Inductor then
passes w itself, in place. If w is read later on, Inductor passes a copy, and the receiver, which identifies a weight by
its address, raises an error (reverse.py) rather than update the copy. PyTorch before 2.13 cannot trace a backward that
is declared to mutate a parameter; there nothing is declared, and only the order of the graph keeps reads of w before
its change (tests compare compiled blocks with plain ones). The backward has a second result, the "gradient" of an
anchor: a zero that is an input of every linear layer. Because of it the operation is never removed as dead code, even
if dx is not needed. The weight itself gets no gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Receiver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # (w_OI, dy_MO, x_MI)
TELLS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
CHANGED = ("w",) if TELLS else ()
_receivers: list[Receiver] = []  # the last one is current
_anchors: dict[torch.device, torch.Tensor] = {}


@torch.library.custom_op("keyhole::linear", mutates_args=())
def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, anchor: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b)


@_linear.register_fake
def _linear_shape(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, anchor: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@torch.library.custom_op("keyhole::linear_reverse", mutates_args=CHANGED)
def _linear_reverse(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        dx = dy @ w
        _receivers[-1](w, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
    return dx, torch.zeros(1, device=dy.device)


@_linear_reverse.register_fake
def _linear_reverse_shape(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return dy.new_empty((*dy.shape[:-1], w.shape[1])), torch.zeros(1, device=dy.device)


def _setup(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, w, b, _ = inputs
    ctx.save_for_backward(x, w)
    ctx.has_bias = b is not None


def _reverse(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w = ctx.saved_tensors
    db = dy.flatten(0, -2).sum(dim=0) if ctx.has_bias else None
    dx, anchored = torch.ops.keyhole.linear_reverse(dy, x, w)
    return dx, None, db, anchored


_linear.register_autograd(_reverse, setup_context=_setup)


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if layer.weight.requires_grad and type(layer) is nn.Linear:
        return torch.ops.keyhole.linear(x, layer.weight, layer.bias, _anchors[x.device])
    return F.linear(x, layer.weight, layer.bias)


@contextmanager
def linears_offer(device: torch.device) -> Iterator[None]:
    """A context for forward and recomputation of a compiled block, in which linear layers are the operations above."""
    if device not in _anchors:  # must not be created inside compiled code
        _anchors[device] = torch.zeros(1, device=device, requires_grad=True)
    linear: Any = nn.Linear
    before, linear.forward = linear.forward, _forward
    try:
        yield
    finally:
        linear.forward = before


@contextmanager
def offers_go_to(receiver: Receiver) -> Iterator[None]:
    """A context for the backward pass of such a block, in which its offers go to `receiver`."""
    _receivers.append(receiver)
    try:
        yield
    finally:
        _receivers.pop()
        for anchor in _anchors.values():
            anchor.grad = None
