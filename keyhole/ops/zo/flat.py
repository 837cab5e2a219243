"""A zeroth-order step on a flat tensor: update, perturb, or both in one pass over memory (equations: element.py).

plus and minus are computed from the unperturbed weights, so rounding errors do not accumulate, and the update of step
t-1 can be deferred and fused with the perturbation of step t:

    bytes per bfloat16 element
    textbook MeZO (perturb, perturb back, restore, update)    4 x (2 read + 2 written) = 16, 4 draws of z
    fused                                                     2 read + 6 written = 8, 2 draws of z

Two one-sided directions take one pass as well (`beside="next"`): the second output is w + eps z' of the next direction,
for one more draw and no more bytes. An update reads and writes w once, however many directions it sums.

A program owns 8192 elements of the index space: two tiles of noise, one of rounding bits. The programs at both ends
are masked, so any offset and size work; the others take a branch without masks. If the offset is a multiple of 8
elements (and the tensors are 16-byte aligned), memory is accessed 4 elements at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from keyhole.ops.arguments import VECTOR, check_flat
from keyhole.ops.backend import jit, load, on_device, tl, use_kernel
from keyhole.ops.noise.tiles import chunk_noise_reference, tile_noise
from keyhole.ops.noise.words import NUM_WARPS, WIDTH, chunks, lanes, on_host, program_span, span
from keyhole.ops.rounding.bits import TILE, chunk_bits_reference, tile_bits
from keyhole.ops.rounding.round import counts_pairs, no_changes, widened
from keyhole.ops.zo.element import (
    NEXT,
    ZOStep,
    noise_words,
    perturb_reference,
    store_perturbed,
    store_updated,
    updated_reference,
)

REGISTERS = 80  # per thread: three programs then share a multiprocessor, for 2 % more instructions and no spills

_WIDTH, _TILE = tl.constexpr(WIDTH), tl.constexpr(TILE)


def zo_flat_reference_(w: torch.Tensor, plus: torch.Tensor | None, minus: torch.Tensor | None, how: ZOStep) -> None:
    for part in chunks(how.offset, w.numel()):
        n, device = part.stop - part.start, w.device
        where: dict[str, Any] = {"start": how.offset + part.start, "n": n, "seed": how.seed, "device": device}
        draw = partial(chunk_noise_reference, **where, distribution=how.distribution)
        if how.coef is not None:
            update_step = on_host(how.update_step)
            bits = chunk_bits_reference(**where, step=update_step) if how.is_stochastic(w.dtype) else None
            new = updated_reference(w[part], how, _of_step(draw, update_step), bits)
            if how.changed is not None:
                how.changed.add_((new != w[part]).sum())
            w[part] = new
        if plus is not None and minus is not None:
            perturb_reference(w[part], _of_step(draw, on_host(how.step)), how, plus[part], minus[part])


def _of_step(draw: Callable[..., torch.Tensor], step: int) -> Callable[[int], torch.Tensor]:
    """The noise of each direction of a step."""
    return lambda direction: draw(step=step, direction=direction)


@jit()
def direction_sum(coef_ptr, tile, key, HOW: tl.constexpr):
    """u = c_0 z_0 + c_1 z_1 + ... for the four vectors of a noise tile."""
    u0, u1, u2, u3 = tile_noise(tile, 0, key, HOW.GAUSSIAN)
    c = tl.load(coef_ptr + 1)
    u0, u1, u2, u3 = c * u0, c * u1, c * u2, c * u3
    for i in range(1, HOW.Q):
        z0, z1, z2, z3 = tile_noise(tile, i, key, HOW.GAUSSIAN)
        c = tl.load(coef_ptr + 1 + i)
        u0, u1, u2, u3 = u0 + c * z0, u1 + c * z1, u2 + c * z2, u3 + c * z3
    return u0, u1, u2, u3


@jit()
def _noise_tile(
    pointers, tile, bounds, words, noise, rates, changed, FIRST: tl.constexpr, HOW: tl.constexpr, MASKED: tl.constexpr
):
    """The four vectors of a noise tile, FIRST elements into the program's span. Returns the counts of changes."""
    w_ptr, plus_ptr, minus_ptr, coef_ptr = pointers
    update_key, direction, key = noise
    lo, hi = bounds
    eps, wd = rates
    i0 = FIRST + lanes()
    i1, i2, i3 = i0 + _WIDTH, i0 + 2 * _WIDTH, i0 + 3 * _WIDTH
    m0, m1 = (i0 >= lo) & (i0 < hi), (i1 >= lo) & (i1 < hi)
    m2, m3 = (i2 >= lo) & (i2 < hi), (i3 >= lo) & (i3 < hi)
    w0, w1 = load(w_ptr + i0, m0, MASKED), load(w_ptr + i1, m1, MASKED)
    w2, w3 = load(w_ptr + i2, m2, MASKED), load(w_ptr + i3, m3, MASKED)
    if HOW.Q > 0:
        u0, u1, u2, u3 = direction_sum(coef_ptr, tile, update_key, HOW)
        lr = tl.load(coef_ptr)
        a, b = words
        x0, changed = store_updated(w_ptr + i0, m0, w0, u0, a & 0xFFFF, lr, wd, changed, HOW, MASKED)
        x1, changed = store_updated(w_ptr + i1, m1, w1, u1, a >> 16, lr, wd, changed, HOW, MASKED)
        x2, changed = store_updated(w_ptr + i2, m2, w2, u2, b & 0xFFFF, lr, wd, changed, HOW, MASKED)
        x3, changed = store_updated(w_ptr + i3, m3, w3, u3, b >> 16, lr, wd, changed, HOW, MASKED)
    else:
        x0, x1, x2, x3 = widened(w0), widened(w1), widened(w2), widened(w3)
    if HOW.PERTURB > 0:
        z0, z1, z2, z3 = tile_noise(tile, direction, key, HOW.GAUSSIAN)
        n0, n1, n2, n3 = z0, z1, z2, z3
        if HOW.PERTURB == NEXT:
            n0, n1, n2, n3 = tile_noise(tile, direction + 1, key, HOW.GAUSSIAN)
        store_perturbed(plus_ptr + i0, minus_ptr + i0, m0, x0, z0, n0, eps, HOW, MASKED)
        store_perturbed(plus_ptr + i1, minus_ptr + i1, m1, x1, z1, n1, eps, HOW, MASKED)
        store_perturbed(plus_ptr + i2, minus_ptr + i2, m2, x2, z2, n2, eps, HOW, MASKED)
        store_perturbed(plus_ptr + i3, minus_ptr + i3, m3, x3, z3, n3, eps, HOW, MASKED)
    return changed


@jit()
def _span(pointers, changed_ptr, tile, bounds, noise, rates, HOW: tl.constexpr, MASKED: tl.constexpr):
    """8192 elements of the index space, of which those within bounds are the tensor's (all, if not MASKED)."""
    r0, r1, r2, r3 = tile_bits(tile, noise[0], HOW.STOCHASTIC)
    changed = no_changes(lanes(), pointers[0].dtype.element_ty, HOW.PAIRS)
    changed = _noise_tile(pointers, tile * 2, bounds, (r0, r1), noise, rates, changed, 0, HOW, MASKED)
    changed = _noise_tile(pointers, tile * 2 + 1, bounds, (r2, r3), noise, rates, changed, _TILE // 2, HOW, MASKED)
    if HOW.COUNT:
        tl.atomic_add(changed_ptr, tl.sum(changed.to(tl.int32)).to(tl.int64))


@jit(do_not_specialize=["tile_0", "lead", "n", "update_step", "step", "direction", "k0", "k1", "eps", "wd"])
def _zo_kernel(
    w_ptr, plus_ptr, minus_ptr, coef_ptr, changed_ptr,
    tile_0, lead, n, update_step, step, direction, k0, k1, eps, wd,
    HOW: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    """One program: 8192 elements of the index space."""
    if HOW.ON_DEVICE:
        update_step, step = tl.load(update_step), tl.load(step)
    noise = noise_words(update_step, step, direction, k0, k1)
    tile, start, lo, hi = program_span(tile_0, lead, n, _TILE, MULTIPLE)
    w_ptr += start
    if HOW.PERTURB > 0:
        plus_ptr += start
        minus_ptr += start
    pointers = (w_ptr, plus_ptr, minus_ptr, coef_ptr)
    if (lo == 0) & (hi == _TILE):
        _span(pointers, changed_ptr, tile, (lo, hi), noise, (eps, wd), HOW, False)
    else:
        _span(pointers, changed_ptr, tile, (lo, hi), noise, (eps, wd), HOW, True)


def _parts(lead: int, n: int) -> list[tuple[slice, int]]:
    """Parts of the tensor to launch, and a divisor of their starts and ends: a ragged tail must not slow the rest."""
    body = n - n % VECTOR if lead % VECTOR == 0 else 0
    parts = ((slice(0, body), VECTOR), (slice(body, n), 1))
    return [(part, multiple) for part, multiple in parts if part.stop > part.start]


def zo_flat_(w: torch.Tensor, plus: torch.Tensor | None, minus: torch.Tensor | None, how: ZOStep) -> None:
    """Updates w in place, then writes w + eps z to plus and w - eps z (or as in how.beside) to minus, if they are not
    None.

    w, plus, minus: flat; float32 | bfloat16 | float16, maybe different ones.
    """
    how.check(w.numel(), w.device)
    check_flat(w, *(() if plus is None else (plus, minus)))
    if not use_kernel(w.device):
        return zo_flat_reference_(w, plus, minus, how)
    pairs, numbers = counts_pairs(w.dtype, w.device), how.numbers()
    flags = how.flags(perturb=plus is not None, stochastic=how.is_stochastic(w.dtype), pairs=pairs)
    options = {"HOW": flags, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    if torch.version.hip is None:
        options["maxnreg"] = REGISTERS
    with on_device(w):
        parts = _parts(how.offset % TILE, w.numel())
        for part, multiple in parts:
            tensors: Any = w, plus, minus
            if len(parts) > 1:
                tensors = [None if tensor is None else tensor[part] for tensor in tensors]
            programs, place = span(how.offset + part.start, part.stop - part.start, TILE)
            _zo_kernel[(programs,)](*tensors, how.coef, how.changed, *place, *numbers, MULTIPLE=multiple, **options)
