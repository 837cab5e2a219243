"""Rounding float32 to the storage type: to nearest, or stochastically.

A step of size lr * |g| is far below the spacing of 16-bit weights: rounding to nearest loses it, every time.
Stochastic rounding goes up with a probability equal to the fraction discarded, so that the expected stored
value is exact:

    bfloat16   16 bits of the float32 pattern are discarded: add 16 random bits to the pattern, truncate.
    float16    13 bits are discarded in the normal range: add 13 random bits (the top 13 of the 16), truncate.
               Below 2^-14 the grid is even, of step 2^-24: the fraction of a step is compared with the 16
               random bits (unbiased to 2^-17 of a step, since the fraction may have more bits than that).

Exact values never change; inf and nan stay. A finite value beyond the largest of the type may go to inf, as
it may when rounding to nearest: the next grid point up is inf. float32 storage needs no rounding at all.

The bits have their own stream of the generator (tag 2^16, above all directions), 16 bits an element, so a
tile is 8192 elements: group g = (e // 8192) 1024 + e % 1024, lane l = (e // 1024) % 8, and the bits are the
low (even l) or high (odd l) half of word l // 2. See ops/noise/tiles.py for why this shape.
"""

import torch

from keyhole.ops.backend import INTERPRETED, jit, tl
from keyhole.ops.noise.philox import MASK_32, philox, philox_reference
from keyhole.ops.noise.tiles import MAX_DIRECTIONS, WIDTH, lanes, tile_words

STREAM = MAX_DIRECTIONS
TILE = 8 * WIDTH
ROUNDINGS = ("nearest", "stochastic")
FLOAT32_MAX = torch.finfo(torch.float32).max
NAN_WITH_ROOM = 0x7FC00000  # adding 16 bits does not reach the sign
FLOAT16_NORMAL = 2.0**-14
FLOAT16_STEPS = 2.0**24  # subnormal grid points per unit

_WIDTH, _STREAM, _INTERPRETED = tl.constexpr(WIDTH), tl.constexpr(STREAM), tl.constexpr(INTERPRETED)
_FLOAT32_MAX, _NAN = tl.constexpr(FLOAT32_MAX), tl.constexpr(NAN_WITH_ROOM)
_FLOAT16_NORMAL, _FLOAT16_STEPS = tl.constexpr(FLOAT16_NORMAL), tl.constexpr(FLOAT16_STEPS)


def chunk_bits_reference(start: int, n: int, *, seed: int, step: int, device: torch.device) -> torch.Tensor:
    """The 16 bits (int32, 0..65535) of elements start..start+n, which lie in one aligned chunk."""
    words_4G = tile_words(start, n, TILE, seed=seed, step=step, stream=STREAM, device=device)
    words_T4W = words_4G.view(4, -1, WIDTH).transpose(0, 1)
    bits_T42W = torch.stack((words_T4W & 0xFFFF, (words_T4W >> 16) & 0xFFFF), dim=2)
    return bits_T42W.view(-1).narrow(0, start % TILE, n)


def bits_at_reference(e: torch.Tensor, *, seed: int, step: int) -> torch.Tensor:
    """The 16 bits of any elements (int64 indices of any shape)."""
    group, lane = (e >> 13 << 10) | (e & 1023), (e >> 10) & 7
    w0, w1, w2, w3 = philox_reference(group & MASK_32, group >> 32, STREAM, step, seed)
    word = torch.where(lane < 4, torch.where(lane < 2, w0, w1), torch.where(lane < 6, w2, w3))
    return ((word >> ((lane & 1) << 4)) & 0xFFFF).to(torch.int32)


def stochastic_round_reference(x: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 to `dtype` with 16 random bits an element (int32)."""
    if dtype == torch.float32:
        return x
    bits = torch.where(x.abs() <= FLOAT32_MAX, bits, 0)
    pattern = x.view(torch.int32)
    if dtype == torch.bfloat16:
        return ((pattern + bits) & -0x10000).view(torch.float32).to(dtype)
    assert dtype == torch.float16, dtype
    normal = ((pattern + (bits >> 3)) & -0x2000).view(torch.float32)
    steps = x.abs() * FLOAT16_STEPS
    up = (steps - steps.floor()) * 65536 > bits.to(torch.float32) + 0.5
    small = ((steps.floor() + up) * (1 / FLOAT16_STEPS)).copysign(x)
    return torch.where(x.abs() < FLOAT16_NORMAL, small, normal).to(dtype)


@jit()
def tile_bits(tile, step, k0, k1):
    """Four words for a tile of 8 vectors: the low half of word i belongs to vector 2i, the high to 2i + 1."""
    group = tile * _WIDTH
    low = (group & 0xFFFFFFFF).to(tl.uint32) + lanes().to(tl.uint32)
    stream = step * 0 + _STREAM
    return philox(low, (group >> 32).to(tl.uint32), stream, step, k0, k1)


@jit()
def bits_at(e, step, k0, k1):
    """The 16 bits of any elements, from a block of int64 indices."""
    group = (e >> 13 << 10) | (e & 1023)
    low, high = (group & 0xFFFFFFFF).to(tl.uint32), (group >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox(low, high, step * 0 + _STREAM, step, k0, k1)
    second = (e & 2048) != 0
    word = tl.where((e & 4096) == 0, tl.where(second, w1, w0), tl.where(second, w3, w2))
    return tl.where((e & 1024) == 0, word & 0xFFFF, word >> 16)


@jit()
def round_stochastic(x, bits, DTYPE: tl.constexpr):
    """float32 block to DTYPE with 16 random bits an element (uint32).

    Inf has no bits to carry. NVIDIA's arithmetic makes the nan 0x7FFFFFFF, which would carry into the sign:
    as an integer, the minimum with a nan that has room.
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
            y = tl.where(tl.abs(x) < _FLOAT16_NORMAL, small.to(tl.float32, bitcast=True),
                         normal).to(tl.float16)
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
