"""The random bits of stochastic rounding: the documented layout, frozen, and even."""

import math

import torch

from keyhole.ops.noise.words import MASK_32, philox_reference
from keyhole.ops.rounding.bits import (
    STREAM,
    STREAM_2D,
    bits2d_reference,
    bits_at_reference,
    chunk_bits_reference,
)

SEED, STEP, OFFSET = 0xDEADBEEFCAFEBABE, 4_000_000_000, (1 << 33) + 12_347


def test_bits_follow_the_layout() -> None:
    """Group, lane and half of the word are the documented ones, also through the indexed version."""
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


def test_bits_are_uniform() -> None:
    """Each of the 16 bits is set half of the time, and neighbours do not correlate."""
    n = 1 << 18
    bits = chunk_bits_reference(0, n, seed=1, step=1, device=torch.device("cpu"))
    assert 0 <= bits.min() and bits.max() < 1 << 16
    for i in range(16):
        assert abs(((bits >> i) & 1).double().mean() - 0.5) < 4 * 0.5 / math.sqrt(n)
    centred = bits.double() / 65536 - 0.5
    for shift in (1, 1024, 2048, 8192):
        assert abs((centred * centred.roll(shift)).mean()) < 4 / 12 / math.sqrt(n)


def bits2d(m: int, n: int, offset: int = OFFSET) -> torch.Tensor:
    return bits2d_reference(m, n, offset=offset, seed=SEED, step=STEP, device=torch.device("cpu"))


def test_those_of_a_matrix_follow_theirs() -> None:
    """Single elements by the formula at the top of the file; the number of rows does not matter."""
    made = bits2d(300, 70)
    for i, j in [(0, 0), (17, 3), (127, 69), (128, 5), (299, 33)]:
        group, lane = OFFSET + (i // 128 * 16 + i % 16) * 70 + j, i // 16 % 8
        word = philox_reference(group & MASK_32, group >> 32, STREAM_2D, STEP, SEED)[lane // 2]
        assert made[i, j] == (word >> 16 if lane % 2 else word & 0xFFFF)
    assert torch.equal(bits2d(40, 70), made[:40])


def test_those_of_a_matrix_are_uniform() -> None:
    """Means and products of neighbours, rows and lanes are those of independent even numbers."""
    x = bits2d(512, 256).double() / 65536 - 0.5
    assert abs(x.mean()) < 0.005 and abs(x.var() - 1 / 12) < 0.002
    for other in (x.roll(1, 0), x.roll(1, 1), x.roll(16, 0), x.roll(128, 0)):
        assert abs((x * other).mean()) < 0.002
    assert not torch.equal(bits2d(16, 16), bits2d(16, 16, OFFSET + 256))
