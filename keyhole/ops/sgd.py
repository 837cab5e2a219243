"""The SGD update of one tensor, fused: everything that LOMO does with a gradient before it is discarded.

For a tensor whose first element has global index `offset`, element by element in float32:

    g = grad * scale                     scale: clip coefficient, 1 / loss scale, or both, on the device
    sum_squares += g^2 ;  bad = 1 if g is inf or nan (that element's weight stays unchanged)
    g = clamp(g, -clip_value, clip_value)
    g = g + wd w                         torch.optim.SGD's L2 term
    w = round(w - lr g)                  nearest, stochastic, or kahan with the step y = c - lr g (rounding/store.py)

The two products that are added (wd w, lr g) are fused multiply-adds, as in torch.optim.SGD on every device: with
float32 weights on the CPU and no scale, the reference is SGD bit for bit, and the kernel has the reference's bits. The
sum of squares has a fixed order, per program into a scratch buffer and then over the programs, so it repeats bit for
bit; reference and kernel differ there only by rounding. The host never waits.

Bytes per bfloat16 element: 2 (gradient) + 2 (weight) read, 2 written; Kahan 2 + 2 more. Textbook: a float32 copy of
gradient and weight, 4 passes. A program owns 8192 elements, one tile of rounding bits (rounding/bits.py). It loads all
of them before it stores the first, because a compiler cannot move a load above a store that might be to the same
address, and each thread would wait for memory eight times instead of once. Only the programs at both ends are masked.
"""

from dataclasses import dataclass
from typing import Any

import torch

from keyhole.ops.arguments import (
    VECTOR,
    Count,
    Number,
    Scalar,
    check_scalars,
    check_tensors,
    float32,
    is_on_device,
    number,
)
from keyhole.ops.backend import INTERPRETED, jit, load, on_device, store, tl, use_kernel
from keyhole.ops.noise.words import NUM_WARPS, WIDTH, chunks, key, lanes, program_span, span, unsigned
from keyhole.ops.rounding.bits import TILE, chunk_bits_reference, tile_bits, vector_bits
from keyhole.ops.rounding.round import FLOAT32_MAX, count_changed, counts_pairs, no_changes, rounded, widened
from keyhole.ops.rounding.store import Store, store_weight, store_weight_reference_

_WIDTH, _TILE = tl.constexpr(WIDTH), tl.constexpr(TILE)
_INTERPRETED, _FLOAT32_MAX = tl.constexpr(INTERPRETED), tl.constexpr(FLOAT32_MAX)


@dataclass(frozen=True)
class Rule:
    """The settings of one update, and the tensors to which it adds its sums."""

    lr: Number
    weight_decay: float
    clip_value: float | None
    scale: Scalar
    sum_squares: Scalar
    bad: Scalar


def scaled_reference(grad: torch.Tensor, scale: Scalar) -> torch.Tensor:
    """grad * scale in float32; may be grad itself."""
    g = grad.to(torch.float32)
    return g if scale is None else g * scale


@jit()
def scale_or_one(scale_ptr):
    """The scale, 1 if there is none."""
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    return scale


def sum_squares_reference_(grad: torch.Tensor, rule: Rule, offset: int) -> None:
    for part in chunks(offset, grad.numel()):
        g = scaled_reference(grad[part], rule.scale)
        if rule.sum_squares is not None:
            rule.sum_squares.add_(g.square().sum())
        if rule.bad is not None:
            rule.bad.bitwise_or_(~torch.isfinite(g).all())


def sgd_update_reference_(w: torch.Tensor, grad: torch.Tensor, c: torch.Tensor | None, rule: Rule, how: Store) -> None:
    if rule.sum_squares is not None or rule.bad is not None:
        sum_squares_reference_(grad, rule, how.offset)
    which: dict[str, Any] = {"seed": how.seed, "step": int(how.step), "device": w.device}
    stochastic, lr = how.is_stochastic(w.dtype), float(rule.lr)
    for part in chunks(how.offset, w.numel()):
        g, old, c_old = scaled_reference(grad[part], rule.scale), w[part], None if c is None else c[part]
        finite = torch.isfinite(g)
        if rule.clip_value is not None:
            g = g.clamp(-rule.clip_value, rule.clip_value)
        if rule.weight_decay:
            g = g.add(old.to(torch.float32), alpha=rule.weight_decay)
        x = (old if c_old is None else c_old).to(torch.float32).add(g, alpha=-lr)
        bits = chunk_bits_reference(how.offset + part.start, g.numel(), **which) if stochastic else None
        store_weight_reference_(old, c_old, x, finite, bits, how)


@jit()
def fma(a, b, c):
    """a b + c, rounded once. (Triton's interpreter rounds twice, so there it is computed in float64.)"""
    if _INTERPRETED:
        y = (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        y = tl.fma(a, b, c)
    return y


@dataclass(frozen=True)
class Flags:
    """What the kernel is specialised for."""

    STOCHASTIC: bool
    COUNT: bool
    PAIRS: bool
    ON_DEVICE: bool  # lr and step are pointers


def _flags(w: torch.Tensor | None, c: torch.Tensor | None, rule: Rule, how: Store) -> Flags:
    count = w is not None and how.changed is not None
    stochastic = w is not None and how.is_stochastic(w.dtype)
    pairs = w is not None and count and c is None and counts_pairs(w.dtype, w.device)
    return Flags(stochastic, count, pairs, is_on_device(rule.lr, how.step))


@jit()
def _vector(ptr, V: tl.constexpr, bounds, MASKED: tl.constexpr):
    """Vector V of a tile; 0 outside of the tensor."""
    i = V * _WIDTH + lanes()
    return load(ptr + i, (i >= bounds[0]) & (i < bounds[1]), MASKED)


@jit()
def _vectors(ptr, bounds, MASKED: tl.constexpr):
    """The eight vectors of a tile."""
    v0, v1 = _vector(ptr, 0, bounds, MASKED), _vector(ptr, 1, bounds, MASKED)
    v2, v3 = _vector(ptr, 2, bounds, MASKED), _vector(ptr, 3, bounds, MASKED)
    v4, v5 = _vector(ptr, 4, bounds, MASKED), _vector(ptr, 5, bounds, MASKED)
    v6, v7 = _vector(ptr, 6, bounds, MASKED), _vector(ptr, 7, bounds, MASKED)
    return v0, v1, v2, v3, v4, v5, v6, v7


@jit()
def _updated(pointers, V: tl.constexpr, bounds, g, w, bits, rates, changed, HOW: tl.constexpr, MASKED: tl.constexpr):
    """Updates vector V of a tile; returns the counts of changes."""
    w_ptr, c_ptr = pointers
    lr, wd, clip = rates
    i = V * _WIDTH + lanes()
    mask, fine, x = (i >= bounds[0]) & (i < bounds[1]), tl.abs(g) <= _FLOAT32_MAX, widened(w)
    if clip is not None:
        g = tl.minimum(tl.maximum(g, -clip), clip)
    if wd is not None:
        g = fma(x, wd, g)
    if c_ptr is not None:
        step = fma(g, -lr, tl.load(c_ptr + i, mask, 0.0).to(tl.float32))
        changed += store_weight(w_ptr + i, c_ptr + i, mask, fine, w, step, bits, HOW.STOCHASTIC)
    else:
        new = tl.where(fine, rounded(fma(g, -lr, x), bits, w.dtype, HOW.STOCHASTIC)[0], w)
        store(w_ptr + i, new, mask, MASKED)
        if HOW.COUNT:
            changed = count_changed(changed, new, w, mask, HOW.PAIRS, MASKED)
    return changed


@jit()
def _tile(pointers, sums, tile, bounds, key, rates, HOW: tl.constexpr, MASKED: tl.constexpr):
    """8192 elements of the index space, of which those within bounds are the tensor's (all, if not MASKED)."""
    w_ptr, c_ptr, grad_ptr, scale_ptr = pointers
    partial_ptr, bad_ptr, changed_ptr = sums
    grads = _vectors(grad_ptr, bounds, MASKED)
    weights = grads
    if w_ptr is not None:
        weights = _vectors(w_ptr, bounds, MASKED)
    scale, words = scale_or_one(scale_ptr), tile_bits(tile, key, HOW.STOCHASTIC)
    squares, worst = lanes() * 0.0, lanes() * 0.0
    changed = no_changes(lanes(), weights[0].dtype, HOW.PAIRS)
    for v in tl.static_range(8):
        g = widened(grads[v]) * scale
        squares = fma(g, g, squares)
        worst = tl.maximum(worst, tl.abs(g), propagate_nan=tl.PropagateNan.ALL)
        if w_ptr is not None:
            bits = vector_bits(words, v)
            changed = _updated((w_ptr, c_ptr), v, bounds, g, weights[v], bits, rates, changed, HOW, MASKED)
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64), tl.sum(squares))
    if bad_ptr is not None:
        tl.store(bad_ptr, 1, mask=tl.sum((worst <= _FLOAT32_MAX).to(tl.int32)) < _WIDTH)
    if HOW.COUNT:
        tl.atomic_add(changed_ptr, tl.sum(changed.to(tl.int32)).to(tl.int64))


@jit(do_not_specialize=["tile_0", "lead", "n", "step", "k0", "k1", "lr", "wd", "clip"])
def _sgd_kernel(
    w_ptr, c_ptr, grad_ptr, scale_ptr, partial_ptr, bad_ptr, changed_ptr,
    tile_0, lead, n, step, k0, k1, lr, wd, clip,
    HOW: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    """One program: 8192 elements of the index space. Arguments that are None are skipped; without w_ptr, only the
    sums."""
    if HOW.ON_DEVICE:
        lr, step = tl.load(lr), tl.load(step)
    tile, start, lo, hi = program_span(tile_0, lead, n, _TILE, MULTIPLE)
    grad_ptr += start
    if w_ptr is not None:
        w_ptr += start
    if c_ptr is not None:
        c_ptr += start
    pointers, sums = (w_ptr, c_ptr, grad_ptr, scale_ptr), (partial_ptr, bad_ptr, changed_ptr)
    rates, key = (lr, wd, clip), unsigned(step, k0, k1)
    if (lo == 0) & (hi == _TILE):
        _tile(pointers, sums, tile, (lo, hi), key, rates, HOW, False)
    else:
        _tile(pointers, sums, tile, (lo, hi), key, rates, HOW, True)


def _launch(w: torch.Tensor | None, grad: torch.Tensor, c: torch.Tensor | None, rule: Rule, how: Store) -> None:
    """Runs the kernel over the tensor: an update if there is a w, else the sum of squares only."""
    programs, place = span(how.offset, grad.numel(), TILE)
    aligned = how.offset % VECTOR == 0 and grad.numel() % VECTOR == 0
    partial = None if rule.sum_squares is None else torch.empty(programs, device=grad.device)
    tensors = (w, c, grad, rule.scale, partial, rule.bad, how.changed)
    rates = (rule.lr, rule.weight_decay or None, rule.clip_value)
    options = {"MULTIPLE": VECTOR if aligned else 1, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    flags = _flags(w, c, rule, how)
    with on_device(grad):
        _sgd_kernel[(programs,)](*tensors, *place, *key(how.seed, how.step), *rates, HOW=flags, **options)
    if partial is not None and rule.sum_squares is not None:
        rule.sum_squares.add_(partial.sum())


def sgd_update_(
    w: torch.Tensor,
    grad: torch.Tensor,
    *,
    lr: Number,
    weight_decay: float = 0.0,
    scale: Scalar = None,
    clip_value: float | None = None,
    rounding: str = "nearest",
    compensation: torch.Tensor | None = None,
    offset: int = 0,
    seed: int = 0,
    step: Count = 0,
    sum_squares: Scalar = None,
    bad: Scalar = None,
    changed: Scalar = None,
) -> None:
    """w <- round(w - lr (clamp(grad * scale) + wd w)), in place.

    w, grad: contiguous, of one shape, float32 | bfloat16 | float16, maybe different. scale: float32 scalar on the
    device, None for 1. compensation: with rounding "kahan", like w. offset: global index of the first element.
    Added to tensors on the device: sum_squares (float32) of grad * scale, changed (int64), the number of stored values
    that changed. bad (int32): set to 1 if an element of grad * scale is inf or nan; its weight stays unchanged.
    lr and step: values, or both as tensors on the device.
    """
    how = Store(rounding, compensation, offset, seed, step, changed)
    how.check(w, grad)
    check_scalars(w.device, torch.float32, scale, sum_squares)
    check_scalars(w.device, torch.int32, bad)
    clip = None if clip_value is None else float32(clip_value)
    rule = Rule(number(lr), float32(weight_decay), clip, scale, sum_squares, bad)
    run = _launch if use_kernel(w.device) and w.numel() else sgd_update_reference_
    run(w.view(-1), grad.view(-1), None if compensation is None else compensation.view(-1), rule, how)


def sum_squares_(
    grad: torch.Tensor, out: torch.Tensor, scale: Scalar = None, bad: Scalar = None, *, offset: int
) -> None:
    """out (float32 scalar) += the sum of (grad * scale)^2; the same bits as sgd_update_ adds at the same offset.

    bad (int32 scalar): set to 1 if an element of grad * scale is inf or nan.
    """
    check_tensors(grad)
    check_scalars(grad.device, torch.float32, scale, out)
    check_scalars(grad.device, torch.int32, bad)
    rule = Rule(0.0, 0.0, None, scale, out, bad)
    if use_kernel(grad.device) and grad.numel():
        _launch(None, grad.view(-1), None, rule, Store(offset=offset))
    else:
        sum_squares_reference_(grad.view(-1), rule, offset)
