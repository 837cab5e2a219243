"""The random bits of stochastic rounding: the documented layout, frozen, and even."""

import math

import torch

from keyhole.ops.noise.philox import philox_reference
from keyhole.ops.rounding.bits import STREAM, bits_at_reference, chunk_bits_reference


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
