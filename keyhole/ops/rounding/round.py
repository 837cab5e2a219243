"""Rounding float32 to the storage type: to nearest, or stochastically.

A step of size lr * |g| is far below the spacing of 16-bit weights: rounding to nearest loses it every time. Stochastic
rounding rounds up with a probability equal to the discarded fraction, so that the expected stored value is exact:

    bfloat16   16 bits of the float32 pattern are discarded: add 16 random bits to the pattern, truncate.
    float16    13 bits are discarded in the normal range: add 13 random bits (the top 13 of the 16), truncate.
               Below 2^-14 the grid is even, of step 2^-24: the fraction of a step is compared with the 16
               random bits (unbiased to 2^-17 of a step, since the fraction may have more bits than that).

Exact values never change; inf and nan stay. A finite value beyond the largest of the type may become inf, as in
rounding to nearest: the next grid point is inf. float32 storage needs no rounding. The random bits of an element are
those of bits.py.

16-bit weights, two per register: widened, rounded, packed and compared in few instructions.

The passes over the weights are bound by the number of instructions. By default the compiler moves each 16-bit value
into a register of its own and back, and counts changes with a compare, a select and an add for each. A pair takes

    widened          bfloat16 to float32     2 instructions: shift the low half up; mask the low half off
    rounded          float32, low bits 0     1: pick both upper halves
    count_changed    how many differ         2: compare both at once to (1.0 or 0.0), add both at once

Each function has a plain form with the same result, for float32, for Triton's interpreter and for other GPUs. Counts
are kept exactly in the 16-bit type itself: a place in the block is counted 8 times, and bfloat16 counts to 256.
"""

from functools import cache

import torch

from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.ops.backend import INTERPRETED, jit, tl

ROUNDINGS = ("nearest", "stochastic")
FLOAT32_MAX = torch.finfo(torch.float32).max
NAN_WITH_ROOM = 0x7FC00000  # adding 16 bits does not reach the sign
FLOAT16_NORMAL = 2.0**-14
FLOAT16_STEPS = 2.0**24  # subnormal grid points per unit

_INTERPRETED, _FLOAT32_MAX, _NAN = map(tl.constexpr, (INTERPRETED, FLOAT32_MAX, NAN_WITH_ROOM))
_FLOAT16_NORMAL, _FLOAT16_STEPS = tl.constexpr(FLOAT16_NORMAL), tl.constexpr(FLOAT16_STEPS)


def stochastic_round_reference(x: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 to `dtype` with 16 random bits per element (int32)."""
    if dtype == torch.float32:
        return x
    bits = torch.where(x.abs() <= FLOAT32_MAX, bits, 0)
    pattern = x.view(torch.int32)
    if dtype == torch.bfloat16:
        return ((pattern + bits) & -0x10000).view(torch.float32).to(dtype)
    normal = ((pattern + (bits >> 3)) & -0x2000).view(torch.float32)
    steps = x.abs() * FLOAT16_STEPS
    up = (steps - steps.floor()) * 65536 > bits.to(torch.float32) + 0.5
    small = ((steps.floor() + up) * (1 / FLOAT16_STEPS)).copysign(x)
    return torch.where(x.abs() < FLOAT16_NORMAL, small, normal).to(dtype)


@jit()
def round_stochastic(x, bits, DTYPE: tl.constexpr):
    """float32 block to DTYPE with 16 random bits per element (uint32).

    Inf has no bits that could carry. NVIDIA's arithmetic produces the nan 0x7FFFFFFF, whose carry would reach the
    sign: so it is replaced, by an integer minimum, with a nan that has room.
    """
    if DTYPE == tl.float32:
        y = x
    else:
        pattern = tl.minimum(x.to(tl.int32, bitcast=True), _NAN).to(tl.uint32, bitcast=True)
        if DTYPE == tl.bfloat16:
            y = ((pattern + bits) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            normal = ((pattern + (bits >> 3)) & 0xFFFFE000).to(tl.float32, bitcast=True)
            steps = tl.abs(x) * _FLOAT16_STEPS
            whole = tl.floor(steps)
            up = ((steps - whole) * 65536.0 > bits.to(tl.float32) + 0.5).to(tl.float32)
            small = ((whole + up) * (1 / _FLOAT16_STEPS)).to(tl.uint32, bitcast=True) | (pattern & 0x80000000)
            y = tl.where(tl.abs(x) < _FLOAT16_NORMAL, small.to(tl.float32, bitcast=True), normal).to(tl.float16)
    return y


@jit()
def round_nearest(x, DTYPE: tl.constexpr):
    """float32 block to DTYPE, ties to even. (Triton's interpreter truncates to bfloat16: spelt out there.)"""
    if DTYPE == tl.bfloat16 and _INTERPRETED:
        pattern = x.to(tl.uint32, bitcast=True)
        carry = tl.where(tl.abs(x) <= _FLOAT32_MAX, 0x7FFF + ((pattern >> 16) & 1), 0)
        y = ((pattern + carry) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


PAIRS = not INTERPRETED and torch.version.hip is None
_PAIRS = tl.constexpr(PAIRS)
_APART = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_TOGETHER = tl.constexpr("prmt.b32 $0, $1, $2, 0x7632;")
_COUNT_BF16 = tl.constexpr("{.reg .b32 t; set.neu.bf16x2.bf16x2 t, $1, $2; add.rn.bf16x2 $0, $3, t;}")
_COUNT_FP16 = tl.constexpr("{.reg .b32 t; set.neu.f16x2.f16x2 t, $1, $2; add.rn.f16x2 $0, $3, t;}")


@cache
def counts_pairs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether changes are counted two at a time: bfloat16 pairs can be compared from compute capability 9.0 on."""
    if not PAIRS or device.type != ACCELERATOR:
        return False
    return dtype == torch.float16 or (dtype == torch.bfloat16 and accelerator.get_device_capability(device)[0] >= 9)


@jit()
def widened(w):
    """A block of weights in float32."""
    if _PAIRS and w.dtype == tl.bfloat16:
        word = tl.inline_asm_elementwise(_APART, "=&r,=&r,r", [w], tl.uint32, is_pure=True, pack=2)
        wide = word.to(tl.float32, bitcast=True)
    else:
        wide = w.to(tl.float32)
    return wide


@jit()
def rounded(x, bits, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """float32 rounded to DTYPE: as DTYPE, and the same value in float32."""
    if _PAIRS and STOCHASTIC and DTYPE == tl.bfloat16:
        pattern = tl.minimum(x.to(tl.int32, bitcast=True), _NAN).to(tl.uint32, bitcast=True) + bits
        half = tl.inline_asm_elementwise(_TOGETHER, "=r,r,r", [pattern], tl.uint16, is_pure=True, pack=2)
        new = half.to(tl.bfloat16, bitcast=True)
        wide = (pattern & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        if STOCHASTIC:
            new = round_stochastic(x, bits, DTYPE)
        else:
            new = round_nearest(x, DTYPE)
        wide = new.to(tl.float32)
    return new, wide


@jit()
def no_changes(lanes, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """A block of zeros to count in."""
    if PAIRS:
        zeros = (lanes * 0).to(DTYPE)
    else:
        zeros = lanes * 0
    return zeros


@jit()
def count_changed(count, new, w, mask, PAIRS: tl.constexpr, MASKED: tl.constexpr):
    """count + (new != w), element by element."""
    if PAIRS:
        if MASKED:
            new = tl.where(mask, new, w)  # outside of the tensor both are 0: masked.load
        ASM: tl.constexpr = _COUNT_BF16 if w.dtype == tl.bfloat16 else _COUNT_FP16
        count = tl.inline_asm_elementwise(ASM, "=r,r,r,r", [new, w, count], w.dtype, is_pure=True, pack=2)
    else:
        differ = new.to(tl.float32) != w.to(tl.float32)
        if MASKED:
            differ = differ & mask
        count += differ.to(tl.int32)
    return count
