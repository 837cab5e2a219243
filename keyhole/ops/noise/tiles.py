"""Noise without state: z is a pure function of (seed, step, direction, element).

Philox makes four words per counter ("group"). Tiles of 4096 elements define the group, and the word within it ("lane"),
of the element with index e:

    group g = (e // 4096) 1024 + e % 1024     lane l = (e // 1024) % 4
    word l of philox(seed; g, direction, step)

    e in a tile:   0 .. 1023     1024 .. 2047    2048 .. 3071    3072 .. 4095
    group:         0 .. 1023        0 .. 1023       0 .. 1023       0 .. 1023     (+ 1024 per tile)
    lane:             0               1               2               3

So a program that owns a tile makes four vectors of 1024 contiguous values from one vector of counters: no shuffle, no
wasted word, coalesced memory. The value depends only on e: not on the launch shape, the tensor's alignment, the slice,
the device or the number of threads.

    gaussian     lanes (0, 1) and (2, 3) are Box-Muller pairs of words (0, 1) and (2, 3): gaussian.py
    rademacher   +1 where the top bit of word l is 0, -1 where it is 1
"""

from typing import Any, cast

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.noise.gaussian import gaussian_pair, gaussian_pair_reference
from keyhole.ops.noise.words import (
    MASK_32,
    NUM_WARPS,
    WIDTH,
    check_index,
    chunks,
    key,
    lanes,
    philox_reference,
    span,
    unsigned,
    words_of_group,
    words_of_tile,
    words_reference,
)

TILE = 4 * WIDTH
_WIDTH, _TILE = tl.constexpr(WIDTH), tl.constexpr(TILE)


def chunk_noise_reference(
    start: int, n: int, *, seed: int, step: int, direction: int, distribution: str, device: torch.device
) -> torch.Tensor:
    """z of elements start..start+n, which lie in one aligned chunk."""
    words_4G = words_reference(start, n, TILE, seed=seed, step=step, stream=direction, device=device)
    z_T4W = torch.empty(words_4G.shape[1] // WIDTH, 4, WIDTH, device=device)
    z_4TW = z_T4W.transpose(0, 1)
    if distribution == "gaussian":
        even_2G, odd_2G = gaussian_pair_reference(words_4G[0::2], words_4G[1::2])
        z_4TW[0::2] = even_2G.view(2, -1, WIDTH)
        z_4TW[1::2] = odd_2G.view(2, -1, WIDTH)
    else:
        z_4TW.copy_(signs_reference(words_4G).view(4, -1, WIDTH))
    return z_T4W.view(-1).narrow(0, start % TILE, n)


def signs_reference(word: torch.Tensor) -> torch.Tensor:
    """+1 or -1, float32, from words held in int32: copies the sign bit."""
    return (word & -0x80000000).bitwise_or_(0x3F800000).view(torch.float32)


def noise_at_reference(e: torch.Tensor, *, seed: int, step: int, direction: int, distribution: str) -> torch.Tensor:
    """z of any elements (int64 indices of any shape): four times the work per element of a whole tile."""
    group, lane = (e >> 12 << 10) | (e & 1023), (e >> 10) & 3
    words = cast(tuple[torch.Tensor, ...], philox_reference(group & MASK_32, group >> 32, direction, step, seed))
    w0, w1, w2, w3 = (word.to(torch.int32) for word in words)
    a, b = torch.where(lane < 2, w0, w2), torch.where(lane < 2, w1, w3)
    if distribution == "rademacher":
        return signs_reference(torch.where(lane % 2 == 0, a, b))
    even, odd = gaussian_pair_reference(a, b)
    return torch.where(lane % 2 == 0, even, odd)


@jit()
def signs(word):
    """+1.0 or -1.0 from the top bit of a uint32 block."""
    return ((word & 0x80000000) | 0x3F800000).to(tl.float32, bitcast=True)


@jit()
def tile_noise(tile, direction, key, GAUSSIAN: tl.constexpr):
    """The four vectors of one tile. `tile` is a scalar int64; the direction and the key are uint32 scalars."""
    w0, w1, w2, w3 = words_of_tile(tile, lanes(), direction, key)
    if GAUSSIAN:
        z0, z1 = gaussian_pair(w0, w1)
        z2, z3 = gaussian_pair(w2, w3)
    else:
        z0, z1, z2, z3 = signs(w0), signs(w1), signs(w2), signs(w3)
    return z0, z1, z2, z3


@jit()
def noise_at(e, direction, key, GAUSSIAN: tl.constexpr):
    """z of any elements, from a block of int64 indices."""
    w0, w1, w2, w3 = words_of_group((e >> 12 << 10) | (e & 1023), direction, key)
    first, even = (e & 2048) == 0, (e & 1024) == 0
    a, b = tl.where(first, w0, w2), tl.where(first, w1, w3)
    if GAUSSIAN:
        z_even, z_odd = gaussian_pair(a, b)
        z = tl.where(even, z_even, z_odd)
    else:
        z = signs(tl.where(even, a, b))
    return z


@jit(do_not_specialize=["tile_0", "lead", "n", "direction", "step", "k0", "k1"])
def _noise_kernel(z_ptr, tile_0, lead, n, direction, step, k0, k1, GAUSSIAN: tl.constexpr):
    """One program per tile."""
    pid = tl.program_id(0).to(tl.int64)
    direction, key = direction.to(tl.uint32), unsigned(step, k0, k1)
    z = tile_noise(tile_0 + pid, direction, key, GAUSSIAN)
    position = pid * _TILE - lead + lanes()
    for v in tl.static_range(4):
        tl.store(z_ptr + position, z[v], (position >= 0) & (position < n))
        position += _WIDTH


def draw_noise(
    n: int,
    *,
    offset: int,
    seed: int,
    step: int,
    direction: int = 0,
    distribution: str = "gaussian",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """z of elements offset..offset+n as float32 [n], for tests and textbook loops."""
    check_index(offset, n, seed, (step,), direction + 1)
    z = torch.empty(n, device=device)
    if use_kernel(z.device) and n:
        programs, place = span(offset, n, TILE)
        flags = {"GAUSSIAN": distribution == "gaussian", "num_warps": NUM_WARPS, "enable_fp_fusion": False}
        with on_device(z):
            _noise_kernel[(programs,)](z, *place, direction, *key(seed, step), **flags)
        return z
    which: dict[str, Any] = {"seed": seed, "step": step, "direction": direction, "device": z.device}
    which["distribution"] = distribution
    for part in chunks(offset, n):
        z[part] = chunk_noise_reference(offset + part.start, part.stop - part.start, **which)
    return z
