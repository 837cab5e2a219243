"""Philox4x32: random words as a pure function of (key, counter), with no state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). Four counter words and two
key words, 32 bits each. One round multiplies two of the words by constants to 64 bits, xors the high halves
with the other two words and the key, and keeps the low halves:

    c0' = hi(M1 c2) ^ c1 ^ k0      c1' = lo(M1 c2)
    c2' = hi(M0 c0) ^ c3 ^ k1      c3' = lo(M0 c0)      then k0 += W0, k1 += W1

The paper finds that 7 rounds pass all of BigCrush and proposes 10 for safety. We use 7: training noise need not be
secret, and the rounds are most of the arithmetic of a step. ROUNDS is part of the format of a run: its journal
holds seeds, and replay must draw the same words.

The counter in this package is (g low, g high, stream, step), g a group of elements (tiles.py defines it); the key is
the halves of the seed. The products of two rounds then involve only numbers that a whole launch shares: both versions
below take plain ints (scalars in the kernel) for such words and skip that work.

Indices. The index space: every element of a model has one global index, and its random numbers are a function of it.

The index of an element is its tensor's offset plus its position in the tensor. Ops cut their work along tiles of the
index space, whatever the tensor's own start:

    tiles       |    tile_0    |  tile_0 + 1  |  tile_0 + 2  |        a kernel's program owns one tile,
    tensor      .    [---------+--------------+---]                   of which elements lo .. hi exist
                lead           n elements

so what an element gets does not depend on launch shape, device or slicing. Kernels take the place as tile_0, lead, n,
and the words that all counters of a launch share as step, k0, k1: the step and the halves of the seed. They are plain
numbers in a kernel's signature, and tuples in its functions. (Triton compiles a kernel again for an argument that is 1
or a multiple of 16 unless `do_not_specialize` names it, which has no effect on the elements of a tuple.)

Indices go up to 2^44 (17 trillion elements), steps to 2^32, directions to 2^16 (higher streams are for rounding).
"""

from collections.abc import Iterator

import torch

from keyhole.ops.arguments import Count
from keyhole.ops.backend import jit, tl

ROUNDS = 7
MASK_32 = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85

_ROUNDS = tl.constexpr(ROUNDS)
_M0, _M1 = tl.constexpr(MULTIPLIER_0), tl.constexpr(MULTIPLIER_1)
_W0, _W1 = tl.constexpr(WEYL_0), tl.constexpr(WEYL_1)

Word = torch.Tensor | int


def _mix(product: Word, word: Word, key: int) -> Word:
    """hi(product) ^ word ^ key. Bits of `word` above 32 do not matter; tensors are changed in place."""
    high = product >> 32
    high ^= word
    high ^= key
    high &= MASK_32
    return high


def _low(product: Word) -> Word:
    """The low half. A tensor is not masked: the next reader masks it, which saves a pass over memory."""
    return product & MASK_32 if isinstance(product, int) else product


def philox_reference(c0: Word, c1: Word, c2: Word, c3: Word, seed: int, rounds: int = ROUNDS) -> tuple[Word, ...]:
    """Four words in 0..2^32-1, int64 where any counter word they depend on is an int64 tensor."""
    k0, k1 = seed & MASK_32, seed >> 32
    for _ in range(rounds):
        product0, product1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1  # tensors wrap modulo 2^64, as they should
        c0, c1, c2, c3 = _mix(product1, c1, k0), _low(product1), _mix(product0, c3, k1), _low(product0)
        k0, k1 = (k0 + WEYL_0) & MASK_32, (k1 + WEYL_1) & MASK_32
    return c0, c1 & MASK_32, c2, c3 & MASK_32


@jit()
def philox(c0, c1, c2, c3, k0, k1):
    """The same in a kernel: uint32 blocks or scalars in, four uint32 words out."""
    for _ in tl.static_range(_ROUNDS):
        product0, product1 = c0.to(tl.uint64) * _M0, c2.to(tl.uint64) * _M1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = k0 + _W0
        k1 = k1 + _W1
    return c0, c1, c2, c3


WIDTH = 1024  # elements of a vector
CHUNK = 256 * WIDTH  # elements that the reference holds at a time: about 4 MiB of words
ROWS, NUM_WARPS = 4, 8  # shape of a vector in the kernels; WIDTH = ROWS * NUM_WARPS * 32 threads
MAX_INDEX = 1 << 44
MAX_DIRECTIONS = 1 << 16
DISTRIBUTIONS = ("gaussian", "rademacher")

_WIDTH, _ROWS = tl.constexpr(WIDTH), tl.constexpr(ROWS)


def check_index(offset: int, n: int, seed: int, steps: tuple[Count, ...], directions: int = 0) -> None:
    """Asserts the bounds above; a caller that violates them has a bug. Without noise there are no directions."""
    assert 0 <= offset and offset + n <= MAX_INDEX, (offset, n)
    assert 0 <= seed < 1 << 64, seed
    assert all(isinstance(step, torch.Tensor) or 0 <= step < 1 << 32 for step in steps), steps
    assert 0 <= directions <= MAX_DIRECTIONS, directions


def chunks(offset: int, n: int) -> Iterator[slice]:
    """Cuts positions 0..n so that each piece lies in one aligned chunk of the index space."""
    start = 0
    while start < n:
        stop = min(n, start + CHUNK - (offset + start) % CHUNK)
        yield slice(start, stop)
        start = stop


def span(offset: int, n: int, tile: int) -> tuple[int, tuple[int, int, int]]:
    """The number of tiles that hold elements offset..offset+n, and (tile_0, lead, n)."""
    tile_0, lead = divmod(offset, tile)
    return -(-(lead + n) // tile), (tile_0, lead, n)


def int32(word: int) -> int:
    """A word as the signed number with the same bits, so that kernels always take int32 and compile once."""
    return word - (1 << 32) if word >= 1 << 31 else word


def key(seed: int, step: Count) -> tuple[Count, int, int]:
    """(step, k0, k1) as int32; a step on the device stays a tensor."""
    return step if isinstance(step, torch.Tensor) else int32(step), int32(seed & MASK_32), int32(seed >> 32)


def on_host(step: Count) -> int:
    """A step as a Python number; reads it if it is on the device."""
    return int(step) & MASK_32


def words_reference(
    start: int, n: int, tile: int, *, seed: int, step: int, stream: int, device: torch.device
) -> torch.Tensor:
    """Philox words [4, groups] int32 of the tiles that cover elements start..start+n, WIDTH groups to a tile."""
    first, last = start // tile * WIDTH, -(-(start + n) // tile) * WIDTH
    low = torch.arange(first & MASK_32, (first & MASK_32) + last - first, device=device)
    words = philox_reference(low, first >> 32, stream, step, seed)
    words_4G = torch.empty(4, last - first, dtype=torch.int32, device=device)
    for row, word in zip(words_4G, words, strict=True):
        row.copy_(word)
    return words_4G


@jit()
def unsigned(step, k0, k1):
    """The key in a kernel: the same bits as uint32."""
    return step.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32)


@jit()
def program_span(tile_0, lead, n, TILE: tl.constexpr, MULTIPLE: tl.constexpr):
    """This program's tile, its start in the tensor (negative if before it), and the elements lo..hi of it that exist.

    MULTIPLE divides start, lo and hi; from 8 on, the compiler can widen memory accesses.
    """
    pid = tl.program_id(0).to(tl.int64)
    start = pid * TILE - lead
    lo, hi = tl.maximum(-start, 0).to(tl.int32), tl.minimum(n - start, TILE).to(tl.int32)
    if MULTIPLE > 1:
        start = tl.multiple_of(start, MULTIPLE)
        lo, hi = tl.multiple_of(lo, MULTIPLE), tl.multiple_of(hi, MULTIPLE)
    return tile_0 + pid, start, lo, hi


@jit()
def lanes():
    """0 .. 1023 as a block [4, 256], numbered down the columns.

    In Triton's default layout each of the 256 threads holds one column, hence 4 neighbours in memory: loads and stores
    are wide without a shuffle through shared memory.
    """
    rows, columns = tl.arange(0, _ROWS), tl.arange(0, _WIDTH // _ROWS)
    return rows[:, None] + columns[None, :] * _ROWS


@jit()
def words_of_tile(tile, lane, stream, key):
    """Four Philox words for each lane (int32) of a tile (a scalar int64) that has WIDTH groups."""
    step, k0, k1 = key
    group = tile * _WIDTH
    low = (group & 0xFFFFFFFF).to(tl.uint32) + lane.to(tl.uint32)
    return philox(low, (group >> 32).to(tl.uint32), step * 0 + stream, step, k0, k1)


@jit()
def words_of_group(group, stream, key):
    """Four Philox words for each of a block of int64 groups."""
    step, k0, k1 = key
    low, high = (group & 0xFFFFFFFF).to(tl.uint32), (group >> 32).to(tl.uint32)
    return philox(low, high, step * 0 + stream, step, k0, k1)
