"""Random bits for the elements of a matrix that is worked on in tiles: one Philox call for eight of them.

Stochastic rounding needs 16 bits an element (rounding.py), and a call gives 128. There, eight elements 1024 apart share
a call; a kernel that works on tiles of a matrix never has those at hand together. So here they are 16 rows apart:

    row i, column j of a matrix of n columns whose first element has index `offset`:
    group = offset + (i // 128 * 16 + i % 16) n + j          lane = i // 16 % 8

    a strip of 128 rows = 8 lanes of 16 rows; the low half of word l // 2 is lane l's for even l, the high half for odd

Groups of different matrices differ, because those of one lie between its first index and its last. The stream is one
more than that of rounding.py. As there, the bits are a function of seed, step and element only: no launch shape, device
or placement changes them.
"""

import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.noise.philox import MASK_32, philox, philox_reference
from keyhole.ops.rounding import round as rounding

LANE_ROWS, LANES = 16, 8
STRIP_ROWS = LANE_ROWS * LANES
STREAM = rounding.STREAM + 1

_STREAM, _LANE_ROWS = tl.constexpr(STREAM), tl.constexpr(LANE_ROWS)


def strip_bits_reference(m: int, n: int, *, offset: int, seed: int, step: int, device: torch.device) -> torch.Tensor:
    """The bits (int32, 0..65535) of all elements, [m, n]; strip by strip."""
    bits_mn = torch.empty(m, n, dtype=torch.int32, device=device)
    lane_row = torch.arange(LANE_ROWS, device=device)[:, None] * n + torch.arange(n, device=device)
    for strip in range(-(-m // STRIP_ROWS)):
        group = offset + strip * LANE_ROWS * n + lane_row
        words = philox_reference(group & MASK_32, group >> 32, STREAM, step, seed)
        halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
        rows = bits_mn[strip * STRIP_ROWS : (strip + 1) * STRIP_ROWS]
        rows.copy_(torch.cat(halves)[: rows.shape[0]])
    return bits_mn


@jit()
def strip_words(strip, column, n, offset, step, k0, k1):
    """Four words for [LANE_ROWS, columns] of a strip. strip: a scalar; column: int32 [columns]."""
    row = strip.to(tl.int64) * _LANE_ROWS + tl.arange(0, _LANE_ROWS)
    group = offset.to(tl.int64) + row[:, None] * n + column[None, :]
    low, high = (group & 0xFFFFFFFF).to(tl.uint32), (group >> 32).to(tl.uint32)
    return philox(low, high, step * 0 + _STREAM, step, k0, k1)


@jit()
def lane_bits(w0, w1, w2, w3, lane):
    """The bits of a lane (a scalar)."""
    word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
    return tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16)
