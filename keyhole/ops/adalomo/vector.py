"""AdaLOMO's update of a vector, with a full second moment, in one program.

    g = grad * scale        v = beta v + (1 - beta) (g^2 + eps1)        u = g rsqrt(v)        then step.py

A norm's weight or a bias has a few thousand elements: the three passes over it (sums of g^2 and w^2, sum of u^2, moment
and update) read from cache, so the cost is one launch. State: 4 bytes per element. Sums have a fixed order; kernel and
reference differ only by rounding.
"""

import torch

from keyhole.ops.adalomo.step import Rule, State, if_finite, moment_reference_, moved, step_reference_, step_size
from keyhole.ops.arguments import is_on_device
from keyhole.ops.backend import jit, on_device, tl
from keyhole.ops.noise.index import NUM_WARPS, key, unsigned
from keyhole.ops.rounding.bits import bits_at
from keyhole.ops.rounding.store import Store, store_weight
from keyhole.ops.sgd import scale_or_one, scaled_reference

SPAN = 1024  # elements that the program holds at a time


def vector_reference_(w: torch.Tensor, grad: torch.Tensor, state: State, rule: Rule, how: Store) -> None:
    """The formulas above, in order."""
    g = scaled_reference(grad, rule.scale)
    square = g.square()
    total = square.sum()
    v = moment_reference_(state["v"], square + rule.eps1, rule.beta, total)
    step_reference_(w, g * v.rsqrt(), total, rule, how)


@jit()
def _moment(v, g, beta, eps1):
    """The new second moment of a vector."""
    return beta * v + (1 - beta) * (g * g + eps1)


@jit(do_not_specialize=["offset", "n", "step", "k0", "k1", "lr", "beta", "wd", "eps1", "eps2", "clip_threshold"])
def _vector_kernel(
    w_ptr, c_ptr, grad_ptr, v_ptr, scale_ptr, sum_ptr, bad_ptr, changed_ptr,
    offset, n, step, k0, k1, lr, beta, wd, eps1, eps2, clip_threshold,
    STOCHASTIC: tl.constexpr, SPAN: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """The whole vector, one program, three passes over it: sums of g^2 and w^2, sum of u^2, moment and update.
    ON_DEVICE: lr, beta and step are pointers."""
    if ON_DEVICE:
        lr, beta, step = tl.load(lr), tl.load(beta), tl.load(step)
    key = unsigned(step, k0, k1)
    scale, lane = scale_or_one(scale_ptr), tl.arange(0, SPAN)
    g_squares, w_squares, u_squares = lane * 0.0, lane * 0.0, lane * 0.0
    for start in range(0, n, SPAN):
        i, mask = start + lane, start + lane < n
        g = tl.load(grad_ptr + i, mask, 0.0).to(tl.float32) * scale
        w_fp32 = tl.load(w_ptr + i, mask, 0.0).to(tl.float32)
        g_squares += g * g
        w_squares += w_fp32 * w_fp32
    total = tl.sum(g_squares)
    stop = if_finite(total, n)
    for start in range(0, n, SPAN):
        i, mask = start + lane, start + lane < n
        g = tl.load(grad_ptr + i, mask, 0.0).to(tl.float32) * scale
        u = g * tl.rsqrt(_moment(tl.load(v_ptr + i, mask, 1.0), g, beta, eps1))
        u_squares += u * u
    a, divisor = step_size(tl.sum(w_squares), tl.sum(u_squares), n.to(tl.float32), lr, eps2, clip_threshold)
    changed = lane * 0
    for start in range(0, n, SPAN):
        i, mask = start + lane, start + lane < n
        g = tl.load(grad_ptr + i, mask, 0.0).to(tl.float32) * scale
        v = _moment(tl.load(v_ptr + i, mask, 1.0), g, beta, eps1)
        tl.store(v_ptr + i, v, i < stop)
        u = g * tl.rsqrt(v)
        w = tl.load(w_ptr + i, mask, 0.0)
        at_c = c_ptr
        if c_ptr is not None:
            at_c = c_ptr + i
        x = moved(w.to(tl.float32), at_c, mask, u / divisor, a, wd)
        bits = lane
        if STOCHASTIC:
            bits = bits_at(offset.to(tl.int64) + i, key)
        changed += store_weight(w_ptr + i, at_c, i < stop, mask, w, x, bits, STOCHASTIC)
    if sum_ptr is not None:
        tl.store(sum_ptr, tl.load(sum_ptr) + total)
    if bad_ptr is not None:
        tl.store(bad_ptr, 1, mask=stop == 0)
    if changed_ptr is not None:
        tl.store(changed_ptr, tl.load(changed_ptr) + tl.sum(changed))


def vector_triton_(w: torch.Tensor, grad: torch.Tensor, state: State, rule: Rule, how: Store) -> None:
    """The same by kernel."""
    tensors = (w, how.compensation, grad, state["v"], rule.scale, rule.sum_squares, rule.bad, how.changed)
    rates = (rule.lr, rule.beta, rule.weight_decay, rule.eps1, rule.eps2, rule.clip_threshold)
    flags = {"STOCHASTIC": how.is_stochastic(w.dtype), "SPAN": SPAN, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    flags["ON_DEVICE"] = is_on_device(rule.lr, rule.beta, how.step)
    with on_device(w):
        _vector_kernel[(1,)](*tensors, how.offset, w.numel(), *key(how.seed, how.step), *rates, **flags)
