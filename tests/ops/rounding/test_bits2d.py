"""Bits for the elements of a matrix: the layout that is documented, no two elements alike, even."""

import torch

from keyhole.ops.noise.philox import MASK_32, philox_reference
from keyhole.ops.rounding.bits2d import STREAM, bits2d_reference

SEED, STEP, OFFSET = 0xDEADBEEFCAFEBABE, 4_000_000_000, (1 << 33) + 12_347


def bits(m: int, n: int, offset: int = OFFSET) -> torch.Tensor:
    return bits2d_reference(m, n, offset=offset, seed=SEED, step=STEP, device=torch.device("cpu"))


def test_the_layout_is_the_documented_one() -> None:
    """Single elements by the formula at the top of the file; the number of rows does not matter."""
    made = bits(300, 70)
    for i, j in [(0, 0), (17, 3), (127, 69), (128, 5), (299, 33)]:
        group, lane = OFFSET + (i // 128 * 16 + i % 16) * 70 + j, i // 16 % 8
        word = philox_reference(group & MASK_32, group >> 32, STREAM, STEP, SEED)[lane // 2]
        assert made[i, j] == (word >> 16 if lane % 2 else word & 0xFFFF)
    assert torch.equal(bits(40, 70), made[:40])


def test_bits_are_even_and_differ_between_neighbours() -> None:
    """Means and products of neighbours, rows and lanes are those of independent even numbers."""
    x = bits(512, 256).double() / 65536 - 0.5
    assert abs(x.mean()) < 0.005 and abs(x.var() - 1 / 12) < 0.002
    for other in (x.roll(1, 0), x.roll(1, 1), x.roll(16, 0), x.roll(128, 0)):
        assert abs((x * other).mean()) < 0.002
    assert not torch.equal(bits(16, 16), bits(16, 16, OFFSET + 256))
