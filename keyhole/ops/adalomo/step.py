"""The end of AdaLOMO's update, for matrices and vectors: from the normalised gradient u to the stored weight.

    u   /= max(1, rms(u) / clip_threshold)        a = lr max(eps2, rms(w))        w = round(w (1 - a wd) - a u)

rms is over the whole tensor. With the rounding "kahan" (rounding/store.py) the step is y = (c - a u) - (a wd) w. If the
gradient of a tensor has an inf or nan (or a sum of squares beyond float32), the tensor stays unchanged and `bad` is
set, because one such element would spread through the rms over everything. u is computed in matrix.py and vector.py.
"""

from dataclasses import dataclass

import torch

from keyhole.ops.arguments import Number, Scalar
from keyhole.ops.backend import jit, tl
from keyhole.ops.rounding.bits import bits_reference
from keyhole.ops.rounding.round import FLOAT32_MAX
from keyhole.ops.rounding.store import Store, store_weight_reference_

_FLOAT32_MAX = tl.constexpr(FLOAT32_MAX)

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """The settings of one update, and the tensors to which it adds its sums."""

    lr: Number
    weight_decay: float
    beta: Number
    eps1: float
    eps2: float
    clip_threshold: float
    scale: Scalar
    sum_squares: Scalar
    bad: Scalar


def step_reference_(w: torch.Tensor, u: torch.Tensor, total: torch.Tensor, rule: Rule, how: Store) -> None:
    """The formulas above, in order. total: the sum of squares of the gradient."""
    c, w_fp32, fine = how.compensation, w.to(torch.float32), total <= FLOAT32_MAX
    u = u / (u.square().mean().sqrt() / rule.clip_threshold).clamp(min=1.0)
    a, wd = float(rule.lr) * w_fp32.square().mean().sqrt().clamp(min=rule.eps2), rule.weight_decay
    x = w_fp32 * (1 - a * wd) - a * u if c is None else (c - a * u) - (a * wd) * w_fp32
    bits = bits_reference(w, how.offset, how.seed, int(how.step)) if how.is_stochastic(w.dtype) else None
    store_weight_reference_(w, c, x, fine, bits, how)
    if rule.sum_squares is not None:
        rule.sum_squares.add_(total)
    if rule.bad is not None:
        rule.bad.bitwise_or_(~fine)


def moment_reference_(old: torch.Tensor, mean: torch.Tensor, beta: Number, total: torch.Tensor) -> torch.Tensor:
    """beta old + (1 - beta) mean, in place, unless the gradient is bad."""
    beta = float(beta)
    return old.copy_(torch.where(total <= FLOAT32_MAX, old * beta + mean * (1 - beta), old))


@jit()
def if_finite(total, n):
    """n, or 0 if the gradient is bad: the end of the range to store."""
    return tl.where(total <= _FLOAT32_MAX, n, 0)


@jit()
def step_size(w_squares, u_squares, n, lr, eps2, clip_threshold):
    """a = lr max(eps2, rms(w)) and the divisor max(1, rms(u) / clip_threshold) of u."""
    a = lr * tl.maximum(tl.sqrt(w_squares / n), eps2)
    return a, tl.maximum(tl.sqrt(u_squares / n) / clip_threshold, 1.0)


@jit()
def moved(w_fp32, c_ptr, mask, u, a, wd):
    """x of store_weight: the new weight, or Kahan's step."""
    if c_ptr is not None:
        x = tl.load(c_ptr, mask, 0.0).to(tl.float32) - a * u - (a * wd) * w_fp32
    else:
        x = w_fp32 * (1 - a * wd) - a * u
    return x
