"""The passes over the weights of a zeroth-order step: update, perturb, and both in one.

For a flat tensor w whose first element has global index `offset`, with z_i(t) the noise of direction i at
step t:

    update    u = c_0 z_0 + c_1 z_1 + ...  (in order);   w <- round(w - lr (u + wd w))     z at update_step
    perturb   plus = w + eps z,   minus = w - eps z                                        z at step

`coef` = [lr, c_0, .., c_{q-1}] is on the device: the projected gradients never visit the host, so no step waits
for the one before. The arithmetic is that of element.py. plus and minus are computed from the clean weights, so
nothing drifts, and the update of step t-1 can wait and be fused with the perturbation of step t:

    bytes per bfloat16 element
    textbook MeZO (perturb, perturb back, restore, update)    4 x (2 read + 2 written) = 16, 4 draws of z
    fused                                                     2 read + 6 written = 8, 2 draws of z

One kernel serves the three ops. A program owns 8192 elements: two tiles of noise, one of rounding bits. Its
tiles are those of the index space, not of the tensor, and the programs at both ends are masked, so any offset
and size work; the others take a branch without masks.
Where the offset is a multiple of 8 elements (and the tensors are 16-byte aligned), memory moves 4 elements at
a time.
"""

from functools import partial

import torch

from keyhole.ops.arguments import VECTOR, check_flat, float32
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.noise.tiles import (
    NUM_WARPS,
    WIDTH,
    check,
    chunk_noise_reference,
    chunks,
    int32,
    key,
    lanes,
    tile_noise,
)
from keyhole.ops.rounding.pairs16 import counts_pairs, no_changes, widened
from keyhole.ops.rounding.round import TILE, chunk_bits_reference, tile_bits
from keyhole.ops.zo.element import (
    load,
    perturb_reference,
    stochastic,
    store_perturbed,
    store_updated,
    updated_reference,
)

REGISTERS = 80  # a thread: three programs then share a multiprocessor, for 2 % more instructions and no spills

_WIDTH, _TILE, _VECTOR = tl.constexpr(WIDTH), tl.constexpr(TILE), tl.constexpr(VECTOR)


def zo_update_reference_(w: torch.Tensor, *, offset: int, coef: torch.Tensor, seed: int, step: int,
                         distribution: str, weight_decay: float, rounding: str,
                         changed: torch.Tensor | None) -> None:
    """The update, chunk by chunk."""
    for part in chunks(offset, w.numel()):
        span = dict(start=offset + part.start, n=part.stop - part.start, seed=seed, step=step,
                    device=w.device)
        bits = chunk_bits_reference(**span) if stochastic(rounding, w.dtype) else None
        draw = partial(chunk_noise_reference, distribution=distribution, **span)
        new = updated_reference(w[part], coef, lambda i, draw=draw: draw(direction=i), weight_decay, bits)
        if changed is not None:
            changed += (new != w[part]).sum()
        w[part] = new


def zo_perturb_reference(w: torch.Tensor, plus: torch.Tensor, minus: torch.Tensor, *, offset: int, eps: float,
                         seed: int, step: int, direction: int, distribution: str) -> None:
    """The perturbation, chunk by chunk."""
    for part in chunks(offset, w.numel()):
        z = chunk_noise_reference(offset + part.start, part.stop - part.start, seed=seed, step=step,
                                  direction=direction, distribution=distribution, device=w.device)
        perturb_reference(w[part], z, eps, plus[part], minus[part])


@jit()
def direction_sum(coef_ptr, tile, step, k0, k1, Q: tl.constexpr, GAUSSIAN: tl.constexpr):
    """u = c_0 z_0 + c_1 z_1 + ... for the four vectors of a noise tile."""
    u0, u1, u2, u3 = tile_noise(tile, step * 0, step, k0, k1, GAUSSIAN)
    c = tl.load(coef_ptr + 1)
    u0, u1, u2, u3 = c * u0, c * u1, c * u2, c * u3
    for i in range(1, Q):
        z0, z1, z2, z3 = tile_noise(tile, step * 0 + i, step, k0, k1, GAUSSIAN)
        c = tl.load(coef_ptr + 1 + i)
        u0, u1, u2, u3 = u0 + c * z0, u1 + c * z1, u2 + c * z2, u3 + c * z3
    return u0, u1, u2, u3


@jit()
def _half(w_ptr, plus_ptr, minus_ptr, coef_ptr, tile, lo, hi, word_a, word_b, update_step, step, direction,
          k0, k1, eps, wd, changed, FIRST: tl.constexpr, Q: tl.constexpr, PERTURB: tl.constexpr,
          GAUSSIAN: tl.constexpr, DECAY: tl.constexpr, STOCHASTIC: tl.constexpr, COUNT: tl.constexpr,
          PAIRS: tl.constexpr, MASKED: tl.constexpr):
    """The four vectors of a noise tile, FIRST elements into the program's span. Returns the counts of changes."""
    i0 = FIRST + lanes()
    i1, i2, i3 = i0 + _WIDTH, i0 + 2 * _WIDTH, i0 + 3 * _WIDTH
    m0, m1 = (i0 >= lo) & (i0 < hi), (i1 >= lo) & (i1 < hi)
    m2, m3 = (i2 >= lo) & (i2 < hi), (i3 >= lo) & (i3 < hi)
    w0, w1 = load(w_ptr + i0, m0, MASKED), load(w_ptr + i1, m1, MASKED)
    w2, w3 = load(w_ptr + i2, m2, MASKED), load(w_ptr + i3, m3, MASKED)
    if Q > 0:
        u0, u1, u2, u3 = direction_sum(coef_ptr, tile, update_step, k0, k1, Q, GAUSSIAN)
        lr = tl.load(coef_ptr)
        x0, changed = store_updated(w_ptr + i0, m0, w0, u0, word_a & 0xFFFF, lr, wd, changed, DECAY, STOCHASTIC,
                                    COUNT, PAIRS, MASKED)
        x1, changed = store_updated(w_ptr + i1, m1, w1, u1, word_a >> 16, lr, wd, changed, DECAY, STOCHASTIC,
                                    COUNT, PAIRS, MASKED)
        x2, changed = store_updated(w_ptr + i2, m2, w2, u2, word_b & 0xFFFF, lr, wd, changed, DECAY, STOCHASTIC,
                                    COUNT, PAIRS, MASKED)
        x3, changed = store_updated(w_ptr + i3, m3, w3, u3, word_b >> 16, lr, wd, changed, DECAY, STOCHASTIC,
                                    COUNT, PAIRS, MASKED)
    else:
        x0, x1, x2, x3 = widened(w0), widened(w1), widened(w2), widened(w3)
    if PERTURB:
        z0, z1, z2, z3 = tile_noise(tile, direction, step, k0, k1, GAUSSIAN)
        store_perturbed(plus_ptr + i0, minus_ptr + i0, m0, x0, z0, eps, MASKED)
        store_perturbed(plus_ptr + i1, minus_ptr + i1, m1, x1, z1, eps, MASKED)
        store_perturbed(plus_ptr + i2, minus_ptr + i2, m2, x2, z2, eps, MASKED)
        store_perturbed(plus_ptr + i3, minus_ptr + i3, m3, x3, z3, eps, MASKED)
    return changed


@jit()
def _span(w_ptr, plus_ptr, minus_ptr, coef_ptr, changed_ptr, tile, lo, hi, update_step, step, direction, k0, k1,
          eps, wd, Q: tl.constexpr, PERTURB: tl.constexpr, GAUSSIAN: tl.constexpr, DECAY: tl.constexpr,
          STOCHASTIC: tl.constexpr, COUNT: tl.constexpr, PAIRS: tl.constexpr, MASKED: tl.constexpr):
    """8192 elements of the index space, of which those from lo to hi are the tensor's (all, if not MASKED)."""
    r0, r1, r2, r3 = k0, k0, k0, k0
    if STOCHASTIC:
        r0, r1, r2, r3 = tile_bits(tile, update_step, k0, k1)
    changed = no_changes(lanes(), w_ptr.dtype.element_ty, PAIRS)
    changed = _half(w_ptr, plus_ptr, minus_ptr, coef_ptr, tile * 2, lo, hi, r0, r1, update_step, step,
                    direction, k0, k1, eps, wd, changed, 0, Q, PERTURB, GAUSSIAN, DECAY, STOCHASTIC, COUNT,
                    PAIRS, MASKED)
    changed = _half(w_ptr, plus_ptr, minus_ptr, coef_ptr, tile * 2 + 1, lo, hi, r2, r3, update_step, step,
                    direction, k0, k1, eps, wd, changed, _TILE // 2, Q, PERTURB, GAUSSIAN, DECAY, STOCHASTIC,
                    COUNT, PAIRS, MASKED)
    if COUNT:
        tl.atomic_add(changed_ptr, tl.sum(changed.to(tl.int32)).to(tl.int64))


@jit(do_not_specialize=["tile_0", "lead", "n", "update_step", "step", "direction", "k0", "k1", "eps", "wd"])
def _zo_kernel(w_ptr, plus_ptr, minus_ptr, coef_ptr, changed_ptr, tile_0, lead, n, update_step, step,
               direction, k0, k1, eps, wd, Q: tl.constexpr, PERTURB: tl.constexpr, GAUSSIAN: tl.constexpr,
               DECAY: tl.constexpr, STOCHASTIC: tl.constexpr, COUNT: tl.constexpr, PAIRS: tl.constexpr,
               ALIGNED: tl.constexpr):
    """One program: 8192 elements of the index space. The tensor starts `lead` elements into tile `tile_0`."""
    pid = tl.program_id(0).to(tl.int64)
    tile = tile_0 + pid
    update_step, step, direction = update_step.to(tl.uint32), step.to(tl.uint32), direction.to(tl.uint32)
    k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    start = pid * _TILE - lead  # where in the tensor the program's span begins; negative if before it
    lo, hi = tl.maximum(-start, 0).to(tl.int32), tl.minimum(n - start, _TILE).to(tl.int32)
    if ALIGNED:
        start = tl.multiple_of(start, _VECTOR)
        lo, hi = tl.multiple_of(lo, _VECTOR), tl.multiple_of(hi, _VECTOR)
    w_ptr += start
    if PERTURB:
        plus_ptr += start
        minus_ptr += start
    if (lo == 0) & (hi == _TILE):
        _span(w_ptr, plus_ptr, minus_ptr, coef_ptr, changed_ptr, tile, lo, hi, update_step, step, direction, k0,
              k1, eps, wd, Q, PERTURB, GAUSSIAN, DECAY, STOCHASTIC, COUNT, PAIRS, False)
    else:
        _span(w_ptr, plus_ptr, minus_ptr, coef_ptr, changed_ptr, tile, lo, hi, update_step, step, direction, k0,
              k1, eps, wd, Q, PERTURB, GAUSSIAN, DECAY, STOCHASTIC, COUNT, PAIRS, True)


def _spans(lead: int, n: int) -> list[tuple[slice, bool]]:
    """Parts of the tensor to launch, and whether each is aligned: a ragged tail must not slow the rest."""
    body = n - n % VECTOR if lead % VECTOR == 0 else 0
    parts = ((slice(0, body), True), (slice(body, n), False))
    return [(part, aligned) for part, aligned in parts if part.stop > part.start]


def _launch(w: torch.Tensor, plus: torch.Tensor | None = None, minus: torch.Tensor | None = None, *,
            offset: int, seed: int, distribution: str, coef: torch.Tensor | None = None, update_step: int = 0,
            weight_decay: float = 0.0, rounding: str = "nearest", changed: torch.Tensor | None = None,
            eps: float = 0.0, step: int = 0, direction: int = 0) -> None:
    """Run the kernel over w: an update if there is a coef, a perturbation if there are plus and minus."""
    flags = dict(Q=0 if coef is None else coef.numel() - 1, PERTURB=plus is not None,
                 COUNT=changed is not None, PAIRS=counts_pairs(w.dtype, w.device),
                 GAUSSIAN=distribution == "gaussian", DECAY=weight_decay != 0,
                 STOCHASTIC=stochastic(rounding, w.dtype), num_warps=NUM_WARPS, enable_fp_fusion=False)
    if torch.version.hip is None:
        flags["maxnreg"] = REGISTERS
    with on_device(w):
        for part, aligned in _spans(offset % TILE, w.numel()):
            tile_0, lead = divmod(offset + part.start, TILE)
            n = part.stop - part.start
            plus_, minus_ = (None if tensor is None else tensor[part] for tensor in (plus, minus))
            _zo_kernel[(-(-(lead + n) // TILE),)](
                w[part], plus_, minus_, coef, changed, tile_0, lead, n, int32(update_step), int32(step),
                direction, *key(seed), eps, weight_decay, ALIGNED=aligned, **flags)


def _check_update(coef: torch.Tensor, changed: torch.Tensor | None, device: torch.device) -> None:
    assert coef.dtype == torch.float32 and coef.dim() == 1 and coef.is_contiguous(), (coef.dtype, coef.shape)
    assert coef.numel() >= 2, "coef is [lr, c_0, ...]"
    assert changed is None or (changed.dtype == torch.int64 and changed.numel() == 1), changed
    assert all(tensor is None or tensor.device == device for tensor in (coef, changed)), device


def zo_update_(w: torch.Tensor, *, offset: int, coef: torch.Tensor, seed: int, step: int,
               distribution: str = "gaussian", weight_decay: float = 0.0, rounding: str = "stochastic",
               changed: torch.Tensor | None = None) -> None:
    """w <- round(w - lr (sum_i c_i z_i + wd w)), in place.

    w: flat, float32 | bfloat16 | float16. coef: [lr, c_0, ..] float32 on w's device. step: that of the noise.
    changed: int64 scalar on w's device; the number of elements whose stored value changed is added to it.
    """
    check(offset, w.numel(), seed, (step,), coef.numel() - 1, distribution)
    check_flat(w)
    _check_update(coef, changed, w.device)
    same = dict(offset=offset, coef=coef, seed=seed, distribution=distribution,
                weight_decay=float32(weight_decay), rounding=rounding, changed=changed)
    if use_kernel(w.device):
        _launch(w, update_step=step, **same)
    else:
        zo_update_reference_(w, step=step, **same)


def zo_perturb(w: torch.Tensor, plus: torch.Tensor, minus: torch.Tensor, *, offset: int, eps: float,
               seed: int, step: int, direction: int = 0, distribution: str = "gaussian") -> None:
    """plus <- w + eps z, minus <- w - eps z; the dtype of plus and minus may differ from w's."""
    check(offset, w.numel(), seed, (step,), direction + 1, distribution)
    check_flat(w, plus, minus)
    run = _launch if use_kernel(w.device) else zo_perturb_reference
    run(w, plus, minus, offset=offset, eps=float32(eps), seed=seed, step=step, direction=direction,
        distribution=distribution)


def zo_update_perturb_(w: torch.Tensor, plus: torch.Tensor, minus: torch.Tensor, *, offset: int,
                       coef: torch.Tensor, eps: float, seed: int, update_step: int, step: int,
                       direction: int = 0, distribution: str = "gaussian", weight_decay: float = 0.0,
                       rounding: str = "stochastic", changed: torch.Tensor | None = None) -> None:
    """zo_update_ at update_step, then zo_perturb at step: the same bits, on a GPU in one pass of memory."""
    update = dict(coef=coef, weight_decay=weight_decay, rounding=rounding, changed=changed)
    same = dict(offset=offset, seed=seed, distribution=distribution)
    if not use_kernel(w.device):
        zo_update_(w, step=update_step, **update, **same)
        zo_perturb(w, plus, minus, eps=eps, step=step, direction=direction, **same)
        return
    check(offset, w.numel(), seed, (update_step, step), max(coef.numel() - 1, direction + 1), distribution)
    check_flat(w, plus, minus)
    _check_update(coef, changed, w.device)
    update["weight_decay"] = float32(weight_decay)
    _launch(w, plus, minus, eps=float32(eps), update_step=update_step, step=step, direction=direction,
            **update, **same)
