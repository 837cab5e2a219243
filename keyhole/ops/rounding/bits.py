"""The 16 random bits of each element for stochastic rounding (round.py), as a function of seed, step and index.

They have their own stream of the generator (2^16, above all directions of the noise). A Philox call makes 128 bits, so
a tile is 8192 elements (noise/tiles.py explains this shape):

    group g = (e // 8192) 1024 + e % 1024     lane l = (e // 1024) % 8
    the low half (even l) or the high half (odd l) of word l // 2

So eight elements 1024 apart share a call. A kernel that processes tiles of a matrix never holds these together; for
such kernels (bits2d_reference, strip_words) the eight are 16 rows apart:

    row i, column j of a matrix of n columns whose first element has index `offset`:
    group = offset + (i // 128 * 16 + i % 16) n + j          lane = i // 16 % 8

    a strip of 128 rows = 8 lanes of 16 rows; lane l has the low half (even l) or the high half (odd l) of word l // 2

Different matrices have different groups, because the groups of a matrix lie between its first and its last index. The
stream is one more than the other. In both, the bits are a function of seed, step and element alone: they do not depend
on launch shape, device or placement.
"""

from typing import Any, cast

import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.noise.words import (
    MASK_32,
    MAX_DIRECTIONS,
    WIDTH,
    chunks,
    lanes,
    philox_reference,
    words_of_group,
    words_of_tile,
    words_reference,
)
from keyhole.ops.rounding.round import PAIRS

STREAM = MAX_DIRECTIONS
TILE = 8 * WIDTH

_STREAM = tl.constexpr(STREAM)


def chunk_bits_reference(start: int, n: int, *, seed: int, step: int, device: torch.device) -> torch.Tensor:
    """The bits (int32, 0..65535) of elements start..start+n, which lie in one aligned chunk."""
    words_4G = words_reference(start, n, TILE, seed=seed, step=step, stream=STREAM, device=device)
    words_T4W = words_4G.view(4, -1, WIDTH).transpose(0, 1)
    bits_T42W = torch.stack((words_T4W & 0xFFFF, (words_T4W >> 16) & 0xFFFF), dim=2)
    return bits_T42W.view(-1).narrow(0, start % TILE, n)


def bits_reference(w: torch.Tensor, offset: int, seed: int, step: int) -> torch.Tensor:
    """The bits of all elements of a contiguous tensor, in its shape."""
    which: dict[str, Any] = {"seed": seed, "step": step, "device": w.device}
    parts = [(offset + part.start, part.stop - part.start) for part in chunks(offset, w.numel())]
    return torch.cat([chunk_bits_reference(start, n, **which) for start, n in parts]).view(w.shape)


def bits_at_reference(e: torch.Tensor, *, seed: int, step: int) -> torch.Tensor:
    """The bits of any elements (int64 indices of any shape)."""
    group, lane = (e >> 13 << 10) | (e & 1023), (e >> 10) & 7
    w0, w1, w2, w3 = philox_reference(group & MASK_32, group >> 32, STREAM, step, seed)
    word = torch.where(lane < 4, torch.where(lane < 2, w0, w1), torch.where(lane < 6, w2, w3))
    return ((word >> ((lane & 1) << 4)) & 0xFFFF).to(torch.int32)


@jit()
def tile_bits(tile, key, STOCHASTIC: tl.constexpr):
    """Four words for a tile of 8 vectors (`vector_bits` extracts their bits); arbitrary if not STOCHASTIC."""
    words = (key[1], key[1], key[1], key[1])
    if STOCHASTIC:
        words = words_of_tile(tile, lanes(), _STREAM, key)
    return words


@jit()
def vector_bits(words, V: tl.constexpr):
    """The bits of vector V of a tile: the low half of word V // 2 if V is even, else the high half."""
    if V % 2 == 0:
        bits = words[V // 2] & 0xFFFF
    else:
        bits = words[V // 2] >> 16
    return bits


@jit()
def bits_at(e, key):
    """The bits of any elements, from a block of int64 indices."""
    w0, w1, w2, w3 = words_of_group((e >> 13 << 10) | (e & 1023), _STREAM, key)
    second = (e & 2048) != 0
    word = tl.where((e & 4096) == 0, tl.where(second, w1, w0), tl.where(second, w3, w2))
    return tl.where((e & 1024) == 0, word & 0xFFFF, word >> 16)


LANE_ROWS, LANES = 16, 8
STRIP_ROWS = LANE_ROWS * LANES
STREAM_2D = STREAM + 1

_STREAM_2D, _LANE_ROWS = tl.constexpr(STREAM_2D), tl.constexpr(LANE_ROWS)
_PTX = tl.constexpr(PAIRS)


def bits2d_reference(m: int, n: int, *, offset: int, seed: int, step: int, device: torch.device) -> torch.Tensor:
    """The bits (int32, 0..65535) of all elements, [m, n], strip by strip."""
    bits_mn = torch.empty(m, n, dtype=torch.int32, device=device)
    lane_row = torch.arange(LANE_ROWS, device=device)[:, None] * n + torch.arange(n, device=device)
    for strip in range(-(-m // STRIP_ROWS)):
        group = offset + strip * LANE_ROWS * n + lane_row
        words = cast(tuple[torch.Tensor, ...], philox_reference(group & MASK_32, group >> 32, STREAM_2D, step, seed))
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
        words = words_of_group(group, _STREAM_2D, key)
    return words


@jit()
def lane_bits(words, lane):
    """The bits of a lane (a scalar), from the four words of its strip."""
    w0, w1, w2, w3 = words
    word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
    return tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16)


@jit()
def some_lanes(words, i, COUNT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The words of lanes i COUNT .. (i + 1) COUNT - 1, from the four of the strip, for vector_bits. COUNT: 1 (then
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
