"""The passes of flat.py over weights in 8 bits (fp8.py), in one go: unpack, update, pack, and perturb what was packed.

    update    w = unpacked;   x = w - lr (sum_i c_i z_i + wd w), in float32;   packed <- x, each group of 64 scaled anew
    perturb   w = unpacked;   plus = w + eps z,   minus = w - eps z

The arithmetic is that of element.py and fp8.py, and so are the bits: the reference below is their ops, one after the
other. What the kernel saves is memory. Bytes an element, with plus and minus in 16 bit:

    one after the other    unpack 1 + 4, update 4 + 4, pack 4 + 1, unpack 1 + 4, perturb 4 + 4 = 31, and a float32 copy
    in one go              1 read, 1 + 4 written = 6

A program owns 8192 elements, the tile of rounding bits, like that of flat.py: two tiles of noise, eight vectors of 1024
elements, 16 groups each. A thread holds 4 neighbours of a vector, so 16 threads share a group.
Tensors start and end between groups: `offset` and n are multiples of 64. Legend: V vector.
"""

import torch

from keyhole.ops.arguments import float32
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.fp8 import (
    GROUP,
    coded,
    decoded,
    finite_pattern,
    fp8_decode,
    fp8_encode_,
    packed_bytes,
    scale_exponents,
)
from keyhole.ops.noise.tiles import NUM_WARPS, ROWS, WIDTH, check, int32, key, lanes, tile_noise
from keyhole.ops.rounding.round import ROUNDINGS, TILE, tile_bits
from keyhole.ops.zo.element import store_perturbed
from keyhole.ops.zo.flat import direction_sum, zo_perturb, zo_update_

REGISTERS = 128  # a thread: two programs share a multiprocessor, without spills

_WIDTH, _TILE, _GROUP = tl.constexpr(WIDTH), tl.constexpr(TILE), tl.constexpr(GROUP)
_COLUMNS, _GROUPS, _SHARED = tl.constexpr(WIDTH // ROWS), tl.constexpr(WIDTH // GROUP), tl.constexpr(GROUP // ROWS)


def zo_packed_reference_(packed: torch.Tensor, plus: torch.Tensor | None, minus: torch.Tensor | None, *, n: int,
                         coef: torch.Tensor | None, update_step: int, weight_decay: float, rounding: str,
                         changed: torch.Tensor | None, eps: float, step: int, direction: int, **noise) -> None:
    """One after the other."""
    w = torch.empty(n, device=packed.device)
    fp8_decode(packed, w)
    if coef is not None:
        before = None if changed is None else w.clone()
        zo_update_(w, coef=coef, step=update_step, weight_decay=weight_decay, **noise)
        where = {"offset": noise["offset"], "seed": noise["seed"], "step": update_step}
        fp8_encode_(w, packed, **where, rounding=rounding)
        fp8_decode(packed, w)
        if changed is not None:
            changed += (w != before).sum()
    if plus is not None:
        zo_perturb(w, plus, minus, eps=eps, step=step, direction=direction, **noise)


@jit()
def _vector(codes_ptr, scales_ptr, plus_ptr, minus_ptr, lo, hi, u, z, bits, lr, wd, eps, changed, V: tl.constexpr,
            UPDATE: tl.constexpr, PERTURB: tl.constexpr, DECAY: tl.constexpr, STOCHASTIC: tl.constexpr,
            COUNT: tl.constexpr):
    """Vector V of a tile, of which elements lo to hi exist. Returns the counts of changes."""
    i = V * _WIDTH + lanes()
    here = (i >= lo) & (i < hi)
    column_group = V * _GROUPS + tl.arange(0, _COLUMNS) // _SHARED
    exists = (column_group >= lo // _GROUP) & (column_group < hi // _GROUP)
    k = tl.load(scales_ptr + column_group, exists, 0).to(tl.int32)
    w = decoded(tl.load(codes_ptr + i, here, 0).to(tl.int32), k[None, :])
    if UPDATE:
        if DECAY:
            u = u + wd * w
        x = tl.where(here, w - lr * u, 0.0)
        largest = tl.max(tl.reshape(tl.max(finite_pattern(x), 0), (_GROUPS, _SHARED)), 1)
        k = tl.reshape(tl.broadcast_to(scale_exponents(largest)[:, None], (_GROUPS, _SHARED)), (_COLUMNS,))
        tl.store(scales_ptr + column_group, k.to(tl.uint8), exists & (tl.arange(0, _COLUMNS) % _SHARED == 0))
        code = coded(x, k[None, :], bits, STOCHASTIC)
        tl.store(codes_ptr + i, code.to(tl.uint8), here)
        stored = decoded(code, k[None, :])
        if COUNT:
            changed += ((stored != w) & here).to(tl.int32)
        w = stored
    if PERTURB:
        store_perturbed(plus_ptr + i, minus_ptr + i, here, w, z, eps)
    return changed


@jit()
def _half(codes_ptr, scales_ptr, plus_ptr, minus_ptr, coef_ptr, tile, lo, hi, word_a, word_b, update_step, step,
          direction, k0, k1, lr, wd, eps, changed, V: tl.constexpr, Q: tl.constexpr, PERTURB: tl.constexpr,
          GAUSSIAN: tl.constexpr, DECAY: tl.constexpr, STOCHASTIC: tl.constexpr, COUNT: tl.constexpr):
    """The four vectors of a noise tile."""
    u0, u1, u2, u3 = eps, eps, eps, eps
    z0, z1, z2, z3 = eps, eps, eps, eps
    if Q > 0:
        u0, u1, u2, u3 = direction_sum(coef_ptr, tile, update_step, k0, k1, Q, GAUSSIAN)
    if PERTURB:
        z0, z1, z2, z3 = tile_noise(tile, direction, step, k0, k1, GAUSSIAN)
    changed = _vector(codes_ptr, scales_ptr, plus_ptr, minus_ptr, lo, hi, u0, z0, word_a & 0xFFFF, lr, wd, eps, changed,
                      V, Q > 0, PERTURB, DECAY, STOCHASTIC, COUNT)
    changed = _vector(codes_ptr, scales_ptr, plus_ptr, minus_ptr, lo, hi, u1, z1, word_a >> 16, lr, wd, eps, changed,
                      V + 1, Q > 0, PERTURB, DECAY, STOCHASTIC, COUNT)
    changed = _vector(codes_ptr, scales_ptr, plus_ptr, minus_ptr, lo, hi, u2, z2, word_b & 0xFFFF, lr, wd, eps, changed,
                      V + 2, Q > 0, PERTURB, DECAY, STOCHASTIC, COUNT)
    return _vector(codes_ptr, scales_ptr, plus_ptr, minus_ptr, lo, hi, u3, z3, word_b >> 16, lr, wd, eps, changed,
                   V + 3, Q > 0, PERTURB, DECAY, STOCHASTIC, COUNT)


@jit(do_not_specialize=["tile_0", "lead", "n", "update_step", "step", "direction", "k0", "k1", "eps", "wd"])
def _packed_kernel(packed_ptr, plus_ptr, minus_ptr, coef_ptr, changed_ptr, tile_0, lead, n, update_step, step,
                   direction, k0, k1, eps, wd, Q: tl.constexpr, PERTURB: tl.constexpr, GAUSSIAN: tl.constexpr,
                   DECAY: tl.constexpr, STOCHASTIC: tl.constexpr, COUNT: tl.constexpr):
    """One program: 8192 elements of the index space. The tensor starts `lead` elements into tile `tile_0`."""
    pid = tl.program_id(0).to(tl.int64)
    tile = tile_0 + pid
    update_step, step, direction = update_step.to(tl.uint32), step.to(tl.uint32), direction.to(tl.uint32)
    k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    start = tl.multiple_of(pid * _TILE - lead, _GROUP)  # in the tensor; negative if before it
    lo, hi = tl.maximum(-start, 0).to(tl.int32), tl.minimum(n - start, _TILE).to(tl.int32)
    lo, hi = tl.multiple_of(lo, _GROUP), tl.multiple_of(hi, _GROUP)
    codes_ptr, scales_ptr = packed_ptr + start, packed_ptr + n + start // _GROUP
    if PERTURB:
        plus_ptr += start
        minus_ptr += start
    lr = eps
    r0, r1, r2, r3 = k0, k0, k0, k0
    if Q > 0:
        lr = tl.load(coef_ptr)
        if STOCHASTIC:
            r0, r1, r2, r3 = tile_bits(tile, update_step, k0, k1)
    changed = lanes() * 0
    changed = _half(codes_ptr, scales_ptr, plus_ptr, minus_ptr, coef_ptr, tile * 2, lo, hi, r0, r1, update_step, step,
                    direction, k0, k1, lr, wd, eps, changed, 0, Q, PERTURB, GAUSSIAN, DECAY, STOCHASTIC, COUNT)
    changed = _half(codes_ptr, scales_ptr, plus_ptr, minus_ptr, coef_ptr, tile * 2 + 1, lo, hi, r2, r3, update_step,
                    step, direction, k0, k1, lr, wd, eps, changed, 4, Q, PERTURB, GAUSSIAN, DECAY, STOCHASTIC, COUNT)
    if COUNT:
        tl.atomic_add(changed_ptr, tl.sum(changed).to(tl.int64))


def zo_packed_(packed: torch.Tensor, plus: torch.Tensor | None = None, minus: torch.Tensor | None = None, *, n: int,
               offset: int, seed: int, distribution: str = "gaussian", coef: torch.Tensor | None = None,
               update_step: int = 0, weight_decay: float = 0.0, rounding: str = "stochastic",
               changed: torch.Tensor | None = None, eps: float = 0.0, step: int = 0, direction: int = 0) -> None:
    """An update of n packed weights if there is a coef ([lr, c_0, ..], float32 on the device), then a perturbation if
    there are plus and minus. changed: as in zo_update_, of the values as they are stored."""
    assert packed.dtype == torch.uint8 and packed.shape == (packed_bytes(n),) and offset % GROUP == 0, packed.shape
    assert rounding in ROUNDINGS and (coef is None or coef.dtype == torch.float32), (rounding, coef)
    updated_by = 0 if coef is None else coef.numel() - 1
    check(offset, n, seed, (update_step, step), max(updated_by, direction + 1), distribution)
    decay, eps = float32(weight_decay), float32(eps)
    if not (use_kernel(packed.device) and n):
        zo_packed_reference_(packed, plus, minus, n=n, offset=offset, seed=seed, distribution=distribution, coef=coef,
                             update_step=update_step, weight_decay=decay, rounding=rounding, changed=changed, eps=eps,
                             step=step, direction=direction)
        return
    flags = dict(Q=updated_by, PERTURB=plus is not None, DECAY=decay != 0,
                 GAUSSIAN=distribution == "gaussian", STOCHASTIC=rounding == "stochastic",
                 COUNT=coef is not None and changed is not None, num_warps=NUM_WARPS, enable_fp_fusion=False)
    if torch.version.hip is None:
        flags["maxnreg"] = REGISTERS
    tile_0, lead = divmod(offset, TILE)
    with on_device(packed):
        _packed_kernel[(-(-(lead + n) // TILE),)](
            packed, plus, minus, coef, changed, tile_0, lead, n, int32(update_step), int32(step), direction,
            *key(seed), eps, decay, **flags)
