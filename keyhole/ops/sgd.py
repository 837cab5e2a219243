"""The SGD update of one tensor, fused: everything LOMO does with a gradient before it is thrown away.

For a tensor whose first element has global index `offset`, element by element in float32:

    g = grad * scale                     scale: clip coefficient, 1 / loss scale, or both, on the device
    sum_squares += g^2 ;  bad = 1 if g is inf or nan (that element's weight stays as it is)
    g = clamp(g, -clip_value, clip_value)
    g = g + wd w                         torch.optim.SGD's L2 term
    w = round(w - lr g)                  nearest, stochastic, or kahan with the step y = c - lr g: ops/rounding/store.py

The two products that are added (wd w, lr g) are fused multiply-adds, as in torch.optim.SGD on every device: with
float32 weights on the CPU and no scale, the reference is SGD bit for bit, and the kernel has the reference's bits.
The sum of squares is added up in a fixed order, per program into a scratch buffer and then over the programs, so it
repeats bit for bit; reference and kernel differ there by rounding only. Nothing waits for the host.

Bytes a bfloat16 element: 2 (gradient) + 2 (weight) read, 2 written; Kahan 2 + 2 more. Textbook: a float32 copy of
gradient and weight, 4 passes. A program owns 8192 elements, one tile of rounding bits (ops/rounding/round.py).
"""

import torch

from keyhole.ops.arguments import VECTOR, check_scalars, check_tensors, float32
from keyhole.ops.backend import INTERPRETED, jit, on_device, tl, use_kernel
from keyhole.ops.noise.tiles import NUM_WARPS, WIDTH, check, chunks, int32, key, lanes
from keyhole.ops.rounding.round import FLOAT32_MAX, TILE, chunk_bits_reference, tile_bits
from keyhole.ops.rounding.store import ROUNDINGS, settle, settle_reference

_WIDTH, _TILE, _VECTOR = tl.constexpr(WIDTH), tl.constexpr(TILE), tl.constexpr(VECTOR)
_INTERPRETED, _FLOAT32_MAX = tl.constexpr(INTERPRETED), tl.constexpr(FLOAT32_MAX)


def scaled_reference(grad: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """grad * scale in float32; may be grad itself."""
    g = grad.to(torch.float32)
    return g if scale is None else g * scale


def sum_squares_reference_(grad: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None,
                           bad: torch.Tensor | None, *, offset: int) -> None:
    """Chunk by chunk."""
    for part in chunks(offset, grad.numel()):
        g = scaled_reference(grad[part], scale)
        out += g.square().sum()
        if bad is not None:
            bad |= ~torch.isfinite(g).all()


def sgd_update_reference_(w: torch.Tensor, grad: torch.Tensor, c: torch.Tensor | None, *, lr: float,
                          weight_decay: float, scale: torch.Tensor | None, clip_value: float | None,
                          stochastic: bool, offset: int, seed: int, step: int, sum_squares: torch.Tensor | None,
                          bad: torch.Tensor | None, changed: torch.Tensor | None) -> None:
    """Chunk by chunk."""
    if sum_squares is not None:
        sum_squares_reference_(grad, sum_squares, scale, None, offset=offset)
    for part in chunks(offset, w.numel()):
        g, old, c_old = scaled_reference(grad[part], scale), w[part], None if c is None else c[part]
        finite = torch.isfinite(g)
        if bad is not None:
            bad |= ~finite.all()
        if clip_value is not None:
            g = g.clamp(-clip_value, clip_value)
        if weight_decay:
            g = g.add(old.to(torch.float32), alpha=weight_decay)
        x = (old if c is None else c_old).to(torch.float32).add(g, alpha=-lr)
        bits = None
        if stochastic:
            bits = chunk_bits_reference(offset + part.start, g.numel(), seed=seed, step=step, device=w.device)
        new, c_new = settle_reference(old, x, c_old, bits)
        new = torch.where(finite, new, old)
        if changed is not None:
            changed += (new != old).sum()
        if c is not None:
            c[part] = torch.where(finite, c_new, c_old)
        w[part] = new


@jit()
def fma(a, b, c):
    """a b + c, rounded once. (Triton's interpreter rounds twice: spelt out in float64 there.)"""
    if _INTERPRETED:
        y = (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        y = tl.fma(a, b, c)
    return y


@jit()
def _vector(w_ptr, c_ptr, grad_ptr, lo, hi, bits, scale, lr, wd, clip, V: tl.constexpr, UPDATE: tl.constexpr,
            DECAY: tl.constexpr, CLIP: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Vector V of a tile. Returns, per lane, g^2, whether g is bad, whether the weight changed."""
    i = V * _WIDTH + lanes()
    mask = (i >= lo) & (i < hi)
    g = tl.load(grad_ptr + i, mask, 0.0).to(tl.float32) * scale
    square, finite = g * g, tl.abs(g) <= _FLOAT32_MAX
    changed = i * 0
    if UPDATE:
        w = tl.load(w_ptr + i, mask, 0.0)
        x = w.to(tl.float32)
        if CLIP:
            g = tl.minimum(tl.maximum(g, -clip), clip)
        if DECAY:
            g = fma(x, wd, g)
        at_c = c_ptr
        if c_ptr is not None:
            at_c = c_ptr + i
            x = tl.load(at_c, mask, 0.0).to(tl.float32)
        changed = settle(w_ptr + i, at_c, mask, finite, w, fma(g, -lr, x), bits, STOCHASTIC)
    return square, (mask & ~finite).to(tl.int32), changed


@jit(do_not_specialize=["tile_0", "lead", "n", "step", "k0", "k1", "lr", "wd", "clip"])
def _sgd_kernel(w_ptr, c_ptr, grad_ptr, scale_ptr, partial_ptr, bad_ptr, changed_ptr, tile_0, lead, n, step, k0, k1,
                lr, wd, clip, UPDATE: tl.constexpr, DECAY: tl.constexpr, CLIP: tl.constexpr,
                STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr):
    """One program: 8192 elements of the index space. The tensor starts `lead` elements into tile `tile_0`."""
    pid = tl.program_id(0).to(tl.int64)
    step, k0, k1 = step.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32)
    start = pid * _TILE - lead  # where in the tensor the program's span begins; negative if before it
    lo, hi = tl.maximum(-start, 0).to(tl.int32), tl.minimum(n - start, _TILE).to(tl.int32)
    if ALIGNED:
        start = tl.multiple_of(start, _VECTOR)
        lo, hi = tl.multiple_of(lo, _VECTOR), tl.multiple_of(hi, _VECTOR)
    grad_ptr += start
    if UPDATE:
        w_ptr += start
    if c_ptr is not None:
        c_ptr += start
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    r0, r1, r2, r3 = k0, k0, k0, k0
    if STOCHASTIC:
        r0, r1, r2, r3 = tile_bits(tile_0 + pid, step, k0, k1)
    squares, bads, moves = lanes() * 0.0, lanes() * 0, lanes() * 0
    for v in tl.static_range(8):
        word = r0 if v < 2 else (r1 if v < 4 else (r2 if v < 6 else r3))
        bits = word & 0xFFFF if v % 2 == 0 else word >> 16
        square, bad, moved = _vector(w_ptr, c_ptr, grad_ptr, lo, hi, bits, scale, lr, wd, clip, v, UPDATE, DECAY,
                                     CLIP, STOCHASTIC)
        squares, bads, moves = squares + square, bads + bad, moves + moved
    if partial_ptr is not None:
        tl.store(partial_ptr + pid, tl.sum(squares))
    if bad_ptr is not None:
        tl.store(bad_ptr, 1, mask=tl.sum(bads) > 0)
    if changed_ptr is not None:
        tl.atomic_add(changed_ptr, tl.sum(moves).to(tl.int64))


def _launch(w: torch.Tensor | None, grad: torch.Tensor, c: torch.Tensor | None, *, scale: torch.Tensor | None,
            offset: int, sum_squares: torch.Tensor | None, bad: torch.Tensor | None,
            changed: torch.Tensor | None = None, lr: float = 0.0, weight_decay: float = 0.0,
            clip_value: float | None = None, stochastic: bool = False, seed: int = 0, step: int = 0) -> None:
    """Run the kernel over the tensor: an update if there is a w, else the sum of squares only."""
    tile_0, lead = divmod(offset, TILE)
    programs = -(-(lead + grad.numel()) // TILE)
    aligned = lead % VECTOR == 0 and grad.numel() % VECTOR == 0
    partial = None if sum_squares is None else torch.empty(programs, device=grad.device)
    with on_device(grad):
        _sgd_kernel[(programs,)](
            w, c, grad, scale, partial, bad, changed, tile_0, lead, grad.numel(), int32(step), *key(seed), lr,
            weight_decay, clip_value or 0.0, UPDATE=w is not None, DECAY=weight_decay != 0,
            CLIP=clip_value is not None, STOCHASTIC=stochastic, ALIGNED=aligned, num_warps=NUM_WARPS,
            enable_fp_fusion=False)
    if partial is not None:
        sum_squares += partial.sum()


def sgd_update_(w: torch.Tensor, grad: torch.Tensor, *, lr: float, weight_decay: float = 0.0,
                scale: torch.Tensor | None = None, clip_value: float | None = None, rounding: str = "nearest",
                compensation: torch.Tensor | None = None, offset: int = 0, seed: int = 0, step: int = 0,
                sum_squares: torch.Tensor | None = None, bad: torch.Tensor | None = None,
                changed: torch.Tensor | None = None) -> None:
    """w <- round(w - lr (clamp(grad * scale) + wd w)), in place.

    w, grad: contiguous, of one shape, float32 | bfloat16 | float16, maybe different. scale: float32 scalar on the
    device, None for 1. compensation: with rounding "kahan", like w. offset: global index of the first element.
    On the device, added to what is there: sum_squares (float32) of grad * scale, changed (int64) stored values.
    bad (int32): set to 1 if an element of grad * scale is inf or nan; its weight is left alone.
    """
    assert rounding in ROUNDINGS and (rounding == "kahan") == (compensation is not None), rounding
    check_tensors(w, grad, *(() if compensation is None else (compensation,)))
    assert compensation is None or compensation.dtype == w.dtype, compensation.dtype
    check_scalars(w.device, scale, sum_squares, bad, changed)
    check(offset, w.numel(), seed, (step,))
    c = None if compensation is None else compensation.view(-1)
    run = _launch if use_kernel(w.device) and w.numel() else sgd_update_reference_
    run(w.view(-1), grad.view(-1), c, lr=float32(lr), weight_decay=float32(weight_decay), scale=scale,
        clip_value=None if clip_value is None else float32(clip_value),
        stochastic=rounding == "stochastic" and w.dtype != torch.float32, offset=offset, seed=seed, step=step,
        sum_squares=sum_squares, bad=bad, changed=changed)


def sum_squares_(grad: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None = None,
                 bad: torch.Tensor | None = None, *, offset: int = 0) -> None:
    """out (float32 scalar) += the sum of (grad * scale)^2; the bits sgd_update_ adds at the same offset.

    bad (int32 scalar): set to 1 if an element of grad * scale is inf or nan.
    """
    check_tensors(grad)
    check_scalars(grad.device, scale, out, bad)
    if use_kernel(grad.device) and grad.numel():
        _launch(None, grad.view(-1), None, scale=scale, offset=offset, sum_squares=out, bad=bad)
    else:
        sum_squares_reference_(grad.view(-1), out, scale, bad, offset=offset)
