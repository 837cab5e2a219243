"""The random bits of stochastic rounding: the documented layout, frozen, and even."""

import torch

from keyhole.ops.noise.words import MASK_32, philox_reference
from keyhole.ops.rounding.bits import STREAM, STREAM_2D, bits2d_reference, bits_at_reference, chunk_bits_reference

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
