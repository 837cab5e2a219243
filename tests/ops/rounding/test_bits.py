"""The random bits of stochastic rounding: the documented layout, frozen, and even."""

import pytest
import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.noise.words import MASK_32, WIDTH, lanes, philox_reference, unsigned
from keyhole.ops.rounding.bits import (
    LANE_ROWS,
    LANES,
    STREAM,
    STREAM_2D,
    STRIP_ROWS,
    TILE,
    bits2d_reference,
    bits_at,
    bits_at_reference,
    chunk_bits_reference,
    lane_bits,
    some_lanes,
    strip_words,
    tile_bits,
    vector_bits,
)

SEED, STEP, OFFSET = 0xDEADBEEFCAFEBABE, 4_000_000_000, (1 << 33) + 12_347


def test_bits_follow_the_layout() -> None:
    start, n = 8192 * 5 + 1000, 9000
    bits = chunk_bits_reference(start, n, seed=9, step=3, device=torch.device("cpu"))
    for i in [0, 1, 23, 24, 25, 1048, 3000, 6191, 7192, 7215, 8999]:
        e = start + i
        g, lane = e // 8192 * 1024 + e % 1024, e // 1024 % 8
        word = philox_reference(g, 0, STREAM, 3, 9)[lane // 2]
        assert bits[i] == (word >> (16 * (lane % 2))) & 0xFFFF
    assert torch.equal(bits, bits_at_reference(torch.arange(start, start + n), seed=9, step=3))


def test_the_format_is_frozen() -> None:
    """Replay rounds as the run did, so these bits may never change, on any machine."""
    bits = chunk_bits_reference(8190, 4, seed=0x0123456789ABCDEF, step=41, device=torch.device("cpu"))
    assert bits.tolist() == [16289, 25055, 757, 20002]


def bits2d(m: int, n: int, offset: int = OFFSET) -> torch.Tensor:
    return bits2d_reference(m, n, offset=offset, seed=SEED, step=STEP, device=torch.device("cpu"))


def test_those_of_a_matrix_follow_theirs() -> None:
    made = bits2d(300, 70)
    for i, j in [(0, 0), (17, 3), (127, 69), (128, 5), (299, 33)]:
        group, lane = OFFSET + (i // 128 * 16 + i % 16) * 70 + j, i // 16 % 8
        word = philox_reference(group & MASK_32, group >> 32, STREAM_2D, STEP, SEED)[lane // 2]
        assert made[i, j] == (word >> 16 if lane % 2 else word & 0xFFFF)
    assert torch.equal(bits2d(40, 70), made[:40])


_WIDTH, _ROWS, _LANES = tl.constexpr(WIDTH), tl.constexpr(LANE_ROWS), tl.constexpr(LANES)


@jit()
def _tile_kernel(tiles_ptr, single_ptr, first, step, k0, k1):
    key, at, tile = unsigned(step, k0, k1), lanes(), tl.program_id(0).to(tl.int64) + first
    words = tile_bits(tile, key, True)
    for v in tl.static_range(8):
        tl.store(tiles_ptr + v * _WIDTH + at, vector_bits(words, v).to(tl.int32))
        tl.store(single_ptr + v * _WIDTH + at, bits_at((tile * 8 + v) * _WIDTH + at, key).to(tl.int32))


def test_a_tile_in_a_kernel_has_the_bits_of_its_elements(kernel_device: torch.device) -> None:
    """As vectors of the tile, and element by element."""
    made = torch.empty(2, TILE, dtype=torch.int32, device=kernel_device)
    _tile_kernel[(1,)](made[0], made[1], (1 << 33) // TILE + 3, 41, 7, 9)
    how = {"seed": 9 << 32 | 7, "step": 41, "device": torch.device("cpu")}
    expected = chunk_bits_reference((1 << 33) + 3 * TILE, TILE, **how)
    assert torch.equal(made.cpu(), expected.expand(2, -1))


@jit()
def _strip_kernel(out_ptr, n, offset, step, k0, k1, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """COUNT: lanes at a time, of some_lanes; 0: each lane by itself."""
    strip, column = tl.program_id(0), tl.arange(0, COLUMNS)
    words = strip_words(strip, column, n, offset, unsigned(step, k0, k1), True)
    at = (strip * _LANES * _ROWS + tl.arange(0, _ROWS))[:, None] * n + column[None, :]
    if COUNT == 0:
        for lane in range(_LANES):
            tl.store(out_ptr + at + lane * _ROWS * n, lane_bits(words, lane).to(tl.int32))
    else:
        for i in tl.range(_LANES // COUNT):
            some = some_lanes(words, i, COUNT, True)
            for j in tl.static_range(COUNT):
                bits = some[0]
                if COUNT > 1:
                    bits = vector_bits(some, j)
                tl.store(out_ptr + at + (i * COUNT + j) * _ROWS * n, bits.to(tl.int32))


@pytest.mark.parametrize("count", [0, 1, 2, 4, 8])
def test_a_strip_in_a_kernel_has_the_bits_of_its_rows(kernel_device: torch.device, count: int) -> None:
    """However many of its lanes are taken at a time."""
    made = torch.empty(2 * STRIP_ROWS, 16, dtype=torch.int32, device=kernel_device)
    _strip_kernel[(2,)](made, 16, OFFSET, 41, 7, 9, COUNT=count, COLUMNS=16)
    expected = bits2d_reference(*made.shape, offset=OFFSET, seed=9 << 32 | 7, step=41, device=torch.device("cpu"))
    assert torch.equal(made.cpu(), expected)
