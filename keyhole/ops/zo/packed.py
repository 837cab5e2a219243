"""A zeroth-order step on weights in 8 bits (fp8.py), in one pass: unpack, update, pack, and perturb the packed values.

    update    w = unpacked;   x = w - lr (sum_i c_i z_i + wd w), in float32;   packed <- x, each group of 64 rescaled
    perturb   w = unpacked;   plus = w + eps z,   minus = w - eps z, or another output beside plus (element.py)

The arithmetic and the bits are those of element.py and fp8.py: the reference below calls their ops one after the other.
The kernel saves memory traffic. Bytes per element, with plus and minus in 16 bit:

    one after the other    unpack 1 + 4, update 4 + 4, pack 4 + 1, unpack 1 + 4, perturb 4 + 4 = 31, and a float32 copy
    in one pass            1 read, 1 + 4 written = 6

A program owns 8192 elements, the tile of rounding bits, like that of flat.py: two tiles of noise, eight vectors of 1024
elements, 16 groups each. A thread holds 4 neighbours of a vector, so 16 threads share a group.
Tensors start and end between groups: `offset` and n are multiples of 64. Legend: V vector.
"""

from dataclasses import replace
from typing import cast

import torch

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
from keyhole.ops.noise.tiles import tile_noise
from keyhole.ops.noise.words import NUM_WARPS, ROWS, WIDTH, lanes, program_span, span
from keyhole.ops.rounding.bits import TILE, tile_bits, vector_bits
from keyhole.ops.zo.element import NEXT, ZOStep, noise_words, store_perturbed
from keyhole.ops.zo.flat import direction_sum, zo_flat_

REGISTERS = 128  # per thread: two programs share a multiprocessor, without spills

_WIDTH, _TILE, _GROUP = tl.constexpr(WIDTH), tl.constexpr(TILE), tl.constexpr(GROUP)
_COLUMNS, _GROUPS, _SHARED = tl.constexpr(WIDTH // ROWS), tl.constexpr(WIDTH // GROUP), tl.constexpr(GROUP // ROWS)


def zo_packed_reference_(
    packed: torch.Tensor, n: int, plus: torch.Tensor | None, minus: torch.Tensor | None, how: ZOStep
) -> None:
    w = torch.empty(n, device=packed.device)
    fp8_decode(packed, w)
    if how.coef is not None:
        before = None if how.changed is None else w.clone()
        zo_flat_(w, None, None, replace(how, changed=None))
        step = cast(int, how.update_step)  # steps on packed weights are not recorded
        fp8_encode_(w, packed, offset=how.offset, seed=how.seed, step=step, rounding=how.rounding)
        fp8_decode(packed, w)
        if how.changed is not None and before is not None:
            how.changed.add_((w != before).sum())
    if plus is not None:
        zo_flat_(w, plus, minus, replace(how, coef=None))


@jit()
def _vector(pointers, bounds, u, z, z_next, bits, rates, changed, V: tl.constexpr, HOW: tl.constexpr):
    """Vector V of a tile, of which the elements within bounds exist. Returns the counts of changes."""
    codes_ptr, scales_ptr, plus_ptr, minus_ptr = pointers
    lr, eps, wd = rates
    lo, hi = bounds
    i = V * _WIDTH + lanes()
    here = (i >= lo) & (i < hi)
    column_group = V * _GROUPS + tl.arange(0, _COLUMNS) // _SHARED
    exists = (column_group >= lo // _GROUP) & (column_group < hi // _GROUP)
    k = tl.load(scales_ptr + column_group, exists, 0).to(tl.int32)
    w = decoded(tl.load(codes_ptr + i, here, 0).to(tl.int32), k[None, :])
    if HOW.Q > 0:
        if HOW.DECAY:
            u = u + wd * w
        x = tl.where(here, w - lr * u, 0.0)
        largest = tl.max(tl.reshape(tl.max(finite_pattern(x), 0), (_GROUPS, _SHARED)), 1)
        k = tl.reshape(tl.broadcast_to(scale_exponents(largest)[:, None], (_GROUPS, _SHARED)), (_COLUMNS,))
        tl.store(scales_ptr + column_group, k.to(tl.uint8), exists & (tl.arange(0, _COLUMNS) % _SHARED == 0))
        code = coded(x, k[None, :], bits, HOW.STOCHASTIC)
        tl.store(codes_ptr + i, code.to(tl.uint8), here)
        stored = decoded(code, k[None, :])
        if HOW.COUNT:
            changed += ((stored != w) & here).to(tl.int32)
        w = stored
    if HOW.PERTURB > 0:
        store_perturbed(plus_ptr + i, minus_ptr + i, here, w, z, z_next, eps, HOW)
    return changed


@jit()
def _packed_tile(pointers, coef_ptr, tile, bounds, words, noise, rates, changed, V: tl.constexpr, HOW: tl.constexpr):
    """The four vectors of a noise tile, from vector V on. Returns the counts of changes."""
    update_key, direction, key = noise
    u = (changed, changed, changed, changed)
    z = u
    if HOW.Q > 0:
        u = direction_sum(coef_ptr, tile, update_key, HOW)
    if HOW.PERTURB > 0:
        z = tile_noise(tile, direction, key, HOW.GAUSSIAN)
    n = z
    if HOW.PERTURB == NEXT:
        n = tile_noise(tile, direction + 1, key, HOW.GAUSSIAN)
    for v in tl.static_range(4):
        changed = _vector(pointers, bounds, u[v], z[v], n[v], vector_bits(words, V + v), rates, changed, V + v, HOW)
    return changed


@jit(do_not_specialize=["tile_0", "lead", "n", "update_step", "step", "direction", "k0", "k1", "eps", "wd"])
def _packed_kernel(
    packed_ptr, plus_ptr, minus_ptr, coef_ptr, changed_ptr,
    tile_0, lead, n, update_step, step, direction, k0, k1, eps, wd, HOW: tl.constexpr,
):  # fmt: skip
    """One program: 8192 elements of the index space."""
    noise = noise_words(update_step, step, direction, k0, k1)
    tile, start, lo, hi = program_span(tile_0, lead, n, _TILE, _GROUP)
    if HOW.PERTURB > 0:
        plus_ptr += start
        minus_ptr += start
    pointers = (packed_ptr + start, packed_ptr + n + start // _GROUP, plus_ptr, minus_ptr)
    lr = eps
    if HOW.Q > 0:
        lr = tl.load(coef_ptr)
    words = tile_bits(tile, noise[0], HOW.STOCHASTIC)
    changed, rates = lanes() * 0, (lr, eps, wd)
    changed = _packed_tile(pointers, coef_ptr, tile * 2, (lo, hi), words, noise, rates, changed, 0, HOW)
    changed = _packed_tile(pointers, coef_ptr, tile * 2 + 1, (lo, hi), words, noise, rates, changed, 4, HOW)
    if HOW.COUNT:
        tl.atomic_add(changed_ptr, tl.sum(changed).to(tl.int64))


def zo_packed_(
    packed: torch.Tensor, n: int, plus: torch.Tensor | None, minus: torch.Tensor | None, how: ZOStep
) -> None:
    """zo_flat_ for n packed weights; changes are counted in the stored values."""
    assert packed.dtype == torch.uint8 and packed.shape == (packed_bytes(n),), (packed.dtype, packed.shape)
    assert how.offset % GROUP == 0, how.offset
    how.check(n, packed.device)
    if not use_kernel(packed.device) or n == 0:
        return zo_packed_reference_(packed, n, plus, minus, how)
    flags = how.flags(perturb=plus is not None, stochastic=how.coef is not None and how.rounding == "stochastic")
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    if torch.version.hip is None:
        options["maxnreg"] = REGISTERS
    programs, place = span(how.offset, n, TILE)
    with on_device(packed):
        tensors = (packed, plus, minus, how.coef, how.changed)
        _packed_kernel[(programs,)](*tensors, *place, *how.numbers(), HOW=flags, **options)
