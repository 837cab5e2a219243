"""Random bits for the elements of a matrix that is processed in tiles: one Philox call for eight elements.

Stochastic rounding needs 16 bits per element, and a call makes 128. In bits.py, eight elements 1024 apart share a call;
a kernel that processes tiles of a matrix never holds these together. Here the eight are 16 rows apart:

    row i, column j of a matrix of n columns whose first element has index `offset`:
    group = offset + (i // 128 * 16 + i % 16) n + j          lane = i // 16 % 8

    a strip of 128 rows = 8 lanes of 16 rows; lane l has the low half (even l) or the high half (odd l) of word l // 2

Different matrices have different groups, because the groups of a matrix lie between its first and its last index. The
stream is one more than that of bits.py. As there, the bits are a function of seed, step and element alone: they do not
depend on launch shape, device or placement.
"""

from typing import cast

import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.noise.index import words_of_group
from keyhole.ops.noise.philox import MASK_32, philox_reference
from keyhole.ops.rounding import bits
from keyhole.ops.rounding.pairs16 import PAIRS

LANE_ROWS, LANES = 16, 8
STRIP_ROWS = LANE_ROWS * LANES
STREAM = bits.STREAM + 1

_STREAM, _LANE_ROWS = tl.constexpr(STREAM), tl.constexpr(LANE_ROWS)
_PTX = tl.constexpr(PAIRS)


def bits2d_reference(m: int, n: int, *, offset: int, seed: int, step: int, device: torch.device) -> torch.Tensor:
    """The bits (int32, 0..65535) of all elements, [m, n], strip by strip."""
    bits_mn = torch.empty(m, n, dtype=torch.int32, device=device)
    lane_row = torch.arange(LANE_ROWS, device=device)[:, None] * n + torch.arange(n, device=device)
    for strip in range(-(-m // STRIP_ROWS)):
        group = offset + strip * LANE_ROWS * n + lane_row
        words = cast(tuple[torch.Tensor, ...], philox_reference(group & MASK_32, group >> 32, STREAM, step, seed))
        halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
        rows = bits_mn[strip * STRIP_ROWS : (strip + 1) * STRIP_ROWS]
        rows.copy_(torch.cat(halves)[: rows.shape[0]])
    return bits_mn


@jit()
def strip_words(strip, column, n, offset, key, STOCHASTIC: tl.constexpr, like=None):
    """Four words for [LANE_ROWS, columns] of a strip; arbitrary if not STOCHASTIC. column: int32 [columns].

    like: float32 [LANE_ROWS, columns]; the words are computed by the threads that hold these elements. (An instruction
    that reads both and returns one makes the compiler put both in the same place.)
    """
    words = (key[1], key[1], key[1], key[1])
    if STOCHASTIC:
        row = strip.to(tl.int64) * _LANE_ROWS + tl.arange(0, _LANE_ROWS)
        group = offset.to(tl.int64) + row[:, None] * n + column[None, :]
        if _PTX and like is not None:
            group = tl.inline_asm_elementwise(
                "mov.b64 $0, $1;", "=l,l,r", [group, like], tl.int64, is_pure=True, pack=1
            )
        words = words_of_group(group, _STREAM, key)
    return words


@jit()
def lane_bits(words, lane):
    """The bits of a lane (a scalar), from the four words of its strip."""
    w0, w1, w2, w3 = words
    word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
    return tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16)


@jit()
def some_lanes(words, i, COUNT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The words of lanes i COUNT .. (i + 1) COUNT - 1, from the four of the strip, for bits.vector_bits. COUNT: 1 (then
    the bits themselves) | 2 | 4 | 8."""
    some = words
    if STOCHASTIC:
        w0, w1, w2, w3 = words
        if COUNT == 1:
            some = (lane_bits(words, i),)
        elif COUNT == 2:
            some = (tl.where(i < 2, tl.where(i == 0, w0, w1), tl.where(i == 2, w2, w3)),)
        elif COUNT == 4:
            some = (tl.where(i == 0, w0, w2), tl.where(i == 0, w1, w3))
    return some
