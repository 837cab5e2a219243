"""The 16 random bits of each element for stochastic rounding (round.py), as a function of seed, step and index.

They have their own stream of the generator (2^16, above all directions of the noise). A Philox call makes 128 bits, so
a tile is 8192 elements (noise/tiles.py explains this shape):

    group g = (e // 8192) 1024 + e % 1024     lane l = (e // 1024) % 8
    the low half (even l) or the high half (odd l) of word l // 2
"""

from typing import Any

import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.noise.index import MAX_DIRECTIONS, WIDTH, chunks, lanes, words_of_group, words_of_tile, words_reference
from keyhole.ops.noise.philox import MASK_32, philox_reference

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
