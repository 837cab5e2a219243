"""Noise without state: z is a pure function of (seed, step, direction, element).

Every parameter element has a global index e (its tensor's base + its position). Philox words come four to a
group; which group and which of its words ("lane") belong to e is laid out in tiles of 4096 elements:

    group g = (e // 4096) 1024 + e % 1024     lane l = (e // 1024) % 4
    word l of philox(seed; g, direction, step)

    e in a tile:   0 .. 1023     1024 .. 2047    2048 .. 3071    3072 .. 4095
    group:         0 .. 1023        0 .. 1023       0 .. 1023       0 .. 1023     (+ 1024 per tile)
    lane:             0               1               2               3

So a program that owns a tile makes four vectors of 1024 contiguous values out of one vector of counters: no
shuffle, no wasted word, coalesced memory. And the value depends on e alone: not on the launch shape, the
tensor's alignment, the slice asked for, the device or the thread count.

    gaussian     lanes (0, 1) and (2, 3) are Box-Muller pairs of words (0, 1) and (2, 3): gaussian.py
    rademacher   +1 where the top bit of word l is 0, -1 where it is 1

Indices go up to 2^44 (17 trillion elements), steps to 2^32, directions to 2^16 (higher streams are for
ops/rounding/round.py).
"""

from collections.abc import Iterator

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.noise.gaussian import gaussian_pair, gaussian_pair_reference
from keyhole.ops.noise.philox import MASK_32, philox, philox_reference

WIDTH = 1024  # elements of a vector
TILE = 4 * WIDTH
CHUNK = 64 * TILE  # elements the reference holds at a time: about 4 MiB of words
ROWS, NUM_WARPS = 4, 8  # shape of a vector in the kernels; WIDTH = ROWS * NUM_WARPS * 32 threads
MAX_INDEX = 1 << 44
MAX_DIRECTIONS = 1 << 16
DISTRIBUTIONS = ("gaussian", "rademacher")

_WIDTH, _TILE, _ROWS = tl.constexpr(WIDTH), tl.constexpr(TILE), tl.constexpr(ROWS)


def check(offset: int, n: int, seed: int, steps: tuple[int, ...], directions: int = 0,
          distribution: str = "gaussian") -> None:
    """The bounds of the format; a caller that breaks them has a bug. Without noise there are no directions."""
    assert 0 <= offset and offset + n <= MAX_INDEX, (offset, n)
    assert 0 <= seed < 1 << 64, seed
    assert all(0 <= step < 1 << 32 for step in steps), steps
    assert 0 <= directions <= MAX_DIRECTIONS, directions
    assert distribution in DISTRIBUTIONS, distribution


def chunks(offset: int, n: int) -> Iterator[slice]:
    """Cut positions 0..n so that each piece lies in one aligned chunk of the index space."""
    start = 0
    while start < n:
        stop = min(n, start + CHUNK - (offset + start) % CHUNK)
        yield slice(start, stop)
        start = stop


def tile_words(start: int, n: int, tile: int, *, seed: int, step: int, stream: int,
               device: torch.device) -> torch.Tensor:
    """Words [4, groups] int32 of the tiles that cover elements start..start+n, WIDTH groups to a tile."""
    first, last = start // tile * WIDTH, -(-(start + n) // tile) * WIDTH
    low = torch.arange(first & MASK_32, (first & MASK_32) + last - first, device=device)
    words = philox_reference(low, first >> 32, stream, step, seed)
    words_4G = torch.empty(4, last - first, dtype=torch.int32, device=device)
    for row, word in zip(words_4G, words, strict=True):
        row.copy_(word)
    return words_4G


def chunk_noise_reference(start: int, n: int, *, seed: int, step: int, direction: int, distribution: str,
                          device: torch.device) -> torch.Tensor:
    """z of elements start..start+n, which lie in one aligned chunk."""
    words_4G = tile_words(start, n, TILE, seed=seed, step=step, stream=direction, device=device)
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
    """+1 or -1, float32, from words held in int32: the sign bit moves over."""
    return (word & -0x80000000).bitwise_or_(0x3F800000).view(torch.float32)


def noise_at_reference(e: torch.Tensor, *, seed: int, step: int, direction: int,
                       distribution: str) -> torch.Tensor:
    """z of any elements (int64 indices of any shape): four times the work a whole tile would be."""
    group, lane = (e >> 12 << 10) | (e & 1023), (e >> 10) & 3
    words = philox_reference(group & MASK_32, group >> 32, direction, step, seed)
    w0, w1, w2, w3 = (word.to(torch.int32) for word in words)
    a, b = torch.where(lane < 2, w0, w2), torch.where(lane < 2, w1, w3)
    if distribution == "rademacher":
        return signs_reference(torch.where(lane % 2 == 0, a, b))
    even, odd = gaussian_pair_reference(a, b)
    return torch.where(lane % 2 == 0, even, odd)


def noise_reference(n: int, *, offset: int, seed: int, step: int, direction: int, distribution: str,
                    device: torch.device) -> torch.Tensor:
    """z of elements offset..offset+n as float32 [n]."""
    z = torch.empty(n, device=device)
    for part in chunks(offset, n):
        z[part] = chunk_noise_reference(offset + part.start, part.stop - part.start, seed=seed, step=step,
                                        direction=direction, distribution=distribution, device=device)
    return z


@jit()
def signs(word):
    """+1.0 or -1.0 from the top bit of a uint32 block."""
    return ((word & 0x80000000) | 0x3F800000).to(tl.float32, bitcast=True)


@jit()
def lanes():
    """0 .. 1023 as a block [4, 256], numbered down the columns.

    In Triton's default layout each of the 256 threads holds one column, hence 4 neighbours in memory: loads
    and stores are wide as they stand, and nothing is shuffled through shared memory on the way.
    """
    rows, columns = tl.arange(0, _ROWS), tl.arange(0, _WIDTH // _ROWS)
    return rows[:, None] + columns[None, :] * _ROWS


@jit()
def tile_noise(tile, stream, step, k0, k1, GAUSSIAN: tl.constexpr):
    """The four vectors of one tile. `tile` is a scalar int64; stream, step and the key are uint32 scalars."""
    group = tile * _WIDTH
    low = (group & 0xFFFFFFFF).to(tl.uint32) + lanes().to(tl.uint32)
    w0, w1, w2, w3 = philox(low, (group >> 32).to(tl.uint32), stream, step, k0, k1)
    if GAUSSIAN:
        z0, z1 = gaussian_pair(w0, w1)
        z2, z3 = gaussian_pair(w2, w3)
    else:
        z0, z1, z2, z3 = signs(w0), signs(w1), signs(w2), signs(w3)
    return z0, z1, z2, z3


@jit()
def noise_at(e, stream, step, k0, k1, GAUSSIAN: tl.constexpr):
    """z of any elements, from a block of int64 indices."""
    group = (e >> 12 << 10) | (e & 1023)
    low, high = (group & 0xFFFFFFFF).to(tl.uint32), (group >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox(low, high, stream, step, k0, k1)
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
    """One program a tile. The tensor starts `lead` elements into tile `tile_0`."""
    pid = tl.program_id(0).to(tl.int64)
    stream, step, k0, k1 = direction.to(tl.uint32), step.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32)
    z0, z1, z2, z3 = tile_noise(tile_0 + pid, stream, step, k0, k1, GAUSSIAN)
    position = pid * _TILE - lead + lanes()
    tl.store(z_ptr + position, z0, (position >= 0) & (position < n))
    position += _WIDTH
    tl.store(z_ptr + position, z1, (position >= 0) & (position < n))
    position += _WIDTH
    tl.store(z_ptr + position, z2, (position >= 0) & (position < n))
    position += _WIDTH
    tl.store(z_ptr + position, z3, (position >= 0) & (position < n))


def int32(word: int) -> int:
    """A word as the signed number of the same bits, so that kernels always take int32 and compile once."""
    return word - (1 << 32) if word >= 1 << 31 else word


def key(seed: int) -> tuple[int, int]:
    """The two key words of a seed, as int32."""
    return int32(seed & MASK_32), int32(seed >> 32)


def noise_triton(n: int, *, offset: int, seed: int, step: int, direction: int, distribution: str,
                 device: torch.device) -> torch.Tensor:
    """The same by kernel."""
    z = torch.empty(n, device=device)
    tile_0, lead = divmod(offset, TILE)
    grid = (-(-(lead + n) // TILE),)
    with on_device(z):
        _noise_kernel[grid](z, tile_0, lead, n, direction, int32(step), *key(seed),
                            GAUSSIAN=distribution == "gaussian", num_warps=NUM_WARPS, enable_fp_fusion=False)
    return z


def noise(n: int, *, offset: int, seed: int, step: int, direction: int = 0, distribution: str = "gaussian",
          device: torch.device | str = "cpu") -> torch.Tensor:
    """z of elements offset..offset+n as float32 [n], for tests and textbook loops."""
    device = torch.device(device)
    check(offset, n, seed, (step,), direction + 1, distribution)
    run = noise_triton if use_kernel(device) and n else noise_reference
    return run(n, offset=offset, seed=seed, step=step, direction=direction, distribution=distribution,
               device=device)
