"""A linear layer with an adapter, computed by matrix products alone: no copy of its inputs or outputs in another dtype.

    z = x' A^T      y = x W^T + b + s z B^T      s = alpha / r,  x' = x, or x with dropout
    dz = s dy B     dB = s dy^T z     dA = dz^T x'     dx = dy W + dz A

peft computes the same in float32: it casts x [M, I] to float32, and adds two tensors [M, O] afterwards, about 14 passes
over inputs and outputs, which are memory-bound. Here A and B are rounded to the dtype of compute (r (I + O) numbers),
products accumulate in float32 inside their kernels, and results are added to y and dx in place. In float32 both agree
up to rounding. A and B themselves, their gradients and moments are float32.

The gradients of A and B need x and z; the gradient of x needs W where the layer's weight points to during the backward
pass: in a slot, or unpacked in scratch memory. W is frozen and has no gradient. If W is trained (lomo-lora), or if the
layer is not a plain nn.Linear (GPT-2's Conv1D), the layer itself runs, and only the adapter is added here.

A block is recomputed for its graph. The output of its last product is not used (backward/recompute.py), so this product
is skipped: a quarter of the recomputation of a Llama block.
Legend: M tokens, I inputs, O outputs, r rank.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keyhole.model.backward.recompute import Recompute, Run

ADAPTER = "default"


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Adapted(torch.autograd.Function):
    """y, which holds x W^T + b, plus the adapter; in place, unless y has a graph of its own (layer: None)."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: Any, dropped: Any, a: Any, b: Any, layer: Any, scale: float
    ) -> torch.Tensor:
        x_MI, a_rI, b_Or = _flat(x if dropped is None else dropped), a.to(y.dtype), b.to(y.dtype)
        z_Mr = x_MI @ a_rI.t()
        ctx.save_for_backward(x_MI, z_Mr)
        ctx.a, ctx.b, ctx.layer, ctx.scale, ctx.apart = a, b, layer, scale, dropped is not None
        if layer is None:
            out = y.new_empty(y.shape)  # not a view: Falcon writes into it
            torch.addmm(_flat(y), z_Mr, b_Or.t(), alpha=scale, out=out.view(-1, y.shape[-1]))
            return out
        ctx.mark_dirty(y)
        y.view(-1, y.shape[-1]).addmm_(z_Mr, b_Or.t(), alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MI, z_Mr = ctx.saved_tensors
        wants_y, wants_x, wants_dropped, wants_a, wants_b, _, _ = ctx.needs_input_grad
        dy_MO, a_rI, b_Or = _flat(dy), ctx.a.to(dy.dtype), ctx.b.to(dy.dtype)
        dz_Mr = (dy_MO @ b_Or).mul_(ctx.scale)
        db = (dy_MO.t() @ z_Mr).float().mul_(ctx.scale) if wants_b else None
        da = (dz_Mr.t() @ x_MI).float() if wants_a else None
        shape = (*dy.shape[:-1], a_rI.shape[1])
        dx = d_dropped = None
        if wants_x:
            dx_MI = dz_Mr @ a_rI if ctx.layer is None else dy_MO @ ctx.layer.weight.data
            dx = (dx_MI if ctx.layer is None or ctx.apart else dx_MI.addmm_(dz_Mr, a_rI)).view(shape)
        if wants_dropped:
            d_dropped = (dz_Mr @ a_rI).view(shape)
        return dy if wants_y else None, dx, d_dropped, da, db, None, None


def adapted_forward(layer: Any, x: torch.Tensor, leave_out: bool = False) -> torch.Tensor:
    """The output of a peft layer. leave_out: only its graph is needed, not its value."""
    base, dropout = layer.base_layer, layer.lora_dropout[ADAPTER]
    a, b, scale = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER]
    dropped = dropout(x) if isinstance(dropout, nn.Dropout) and dropout.training else None
    trained = base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad)
    frozen = type(base) is nn.Linear and not trained
    if not frozen:
        y = base(x)
        x = x if dropped is None else dropped
        return _Adapted.apply(y, x, None, a, b, None, scale) if torch.is_grad_enabled() else _add(y, x, a, b, scale)
    with torch.no_grad():
        y = x.new_empty((*x.shape[:-1], base.weight.shape[0])) if leave_out else base(x).detach()
    if not torch.is_grad_enabled():
        return _add(y, x if dropped is None else dropped, a, b, scale)
    return _Adapted.apply(y, x, dropped, a, b, base, scale)


def _add(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Adds the adapter to y without a graph. This is no autograd function, inside of which a pass could not wait for
    its next unit."""
    z_Mr = _flat(x) @ a.to(y.dtype).t()
    y.view(-1, y.shape[-1]).addmm_(z_Mr, b.to(y.dtype).t(), alpha=scale)
    return y


def use_products(layer: Any) -> None:
    """Makes a peft layer compute as above, unless its adapter is merged or disabled. The layer holds its forward, so
    the forward holds a weak reference to the layer; otherwise this cycle would keep the weights alive."""
    theirs, owner = type(layer).forward, weakref.ref(layer)

    def forward(x: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        layer: Any = owner()
        if layer.disable_adapters or layer.merged or args or options:
            return theirs(layer, x, *args, **options)
        return adapted_forward(layer, x)

    layer.forward = forward


class AdapterRecompute(Recompute):
    """Recomputes a block; its last linear layer with an adapter skips its product."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        modules: list[Any] = list(block.modules())
        self.layers = [m for m in modules if hasattr(m, "lora_A") and type(m.base_layer) is nn.Linear]

    def wrapped(self, layer: Any, run: Run) -> Callable:
        return lambda x: adapted_forward(layer, x, leave_out=run.called(saves=2))
