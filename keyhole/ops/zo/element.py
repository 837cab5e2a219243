"""The arithmetic of a zeroth-order step on its elements, be they in a flat tensor (flat.py) or in rows (rows.py).

    update    u = c_0 z_0 + c_1 z_1 + ...  (in order);   w <- round(w - lr (u + wd w))
    perturb   plus = w + eps z,   minus = w - eps z

`coef` = [lr, c_0, .., c_{q-1}] is a float32 tensor on the device. All arithmetic is float32 in the order written, with
no fused multiply-add (the launches switch that off), and one rounding at the end. Whoever wants the bits of one pass
in another takes both from here.
"""

from collections.abc import Callable

import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.rounding.pairs16 import count_changed, rounded, widened
from keyhole.ops.rounding.round import ROUNDINGS, round_nearest, stochastic_round_reference


def stochastic(rounding: str, dtype: torch.dtype) -> bool:
    """Whether random bits are needed: float32 weights are stored as computed."""
    assert rounding in ROUNDINGS, rounding
    return rounding == "stochastic" and dtype != torch.float32


def updated_reference(w: torch.Tensor, coef: torch.Tensor, draw: Callable[[int], torch.Tensor],
                      weight_decay: float, bits: torch.Tensor | None) -> torch.Tensor:
    """round(w - lr (sum_i c_i z_i + wd w)) in w's dtype. `draw(i)` makes z_i; `bits` is None for nearest."""
    w_fp32 = w.to(torch.float32)
    u = draw(0).mul_(coef[1])
    for i in range(1, coef.numel() - 1):
        u.add_(draw(i).mul_(coef[1 + i]))
    if weight_decay:
        u.add_(w_fp32 * weight_decay)
    moved = w_fp32 - u.mul_(coef[0])
    return moved.to(w.dtype) if bits is None else stochastic_round_reference(moved, bits, w.dtype)


@jit()
def updated(w, u, bits, lr, wd, DECAY: tl.constexpr, STOCHASTIC: tl.constexpr):
    """round(w - lr (u + wd w)): in w's dtype, and the same in float32."""
    w_fp32 = widened(w)
    if DECAY:
        u = u + wd * w_fp32
    return rounded(w_fp32 - lr * u, bits, w.dtype, STOCHASTIC)


@jit()
def store_updated(w_ptr, mask, w, u, bits, lr, wd, changed, DECAY: tl.constexpr, STOCHASTIC: tl.constexpr,
                  COUNT: tl.constexpr, PAIRS: tl.constexpr, MASKED: tl.constexpr):
    """Store one updated vector; returns it in float32, and the counts of changes."""
    new, new_fp32 = updated(w, u, bits, lr, wd, DECAY, STOCHASTIC)
    store(w_ptr, new, mask, MASKED)
    if COUNT:
        changed = count_changed(changed, new, w, mask, PAIRS, MASKED)
    return new_fp32, changed


def perturb_reference(w: torch.Tensor, z: torch.Tensor, eps: float, plus: torch.Tensor, minus: torch.Tensor) -> None:
    """plus <- w + eps z, minus <- w - eps z, rounded to nearest in their own dtype. z is used up."""
    w_fp32, move = w.to(torch.float32), z.mul_(eps)
    plus.copy_(w_fp32 + move)
    minus.copy_(w_fp32 - move)


@jit()
def store_perturbed(plus_ptr, minus_ptr, mask, w, z, eps, MASKED: tl.constexpr = True):
    """Store one vector of w + eps z and of w - eps z."""
    w_fp32, move = w.to(tl.float32), eps * z
    store(plus_ptr, round_nearest(w_fp32 + move, plus_ptr.dtype.element_ty), mask, MASKED)
    store(minus_ptr, round_nearest(w_fp32 - move, minus_ptr.dtype.element_ty), mask, MASKED)


@jit()
def load(ptr, mask, MASKED: tl.constexpr):
    """What is outside of the mask is 0."""
    if MASKED:
        x = tl.load(ptr, mask, other=0)
    else:
        x = tl.load(ptr)
    return x


@jit()
def store(ptr, x, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(ptr, x, mask)
    else:
        tl.store(ptr, x)
