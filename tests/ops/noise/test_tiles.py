"""Noise: its layout, its independence of how it is asked for, and its distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.ops import draw_noise
from keyhole.ops.backend import force
from keyhole.ops.noise.tiles import noise_at_reference
from keyhole.ops.noise.words import CHUNK, DISTRIBUTIONS, philox_reference

SEED = 0xFEDCBA9876543210
ODD_SPANS = [(0, 4096), (4095, 2), (123_457, 3001), ((1 << 33) + 12_345, 4500), ((1 << 42) + 77, 900)]


def by_the_book(e: int, seed: int, step: int, direction: int, distribution: str) -> float:
    """z of one element from the definition, in plain Python."""
    g, lane = e // 4096 * 1024 + e % 1024, e // 1024 % 4
    words = philox_reference(g & 0xFFFFFFFF, g >> 32, direction, step, seed)
    if distribution == "rademacher":
        return 1.0 - 2.0 * (words[lane] >> 31)
    a, b = words[0:2] if lane < 2 else words[2:4]
    u1, v, sign = ((a >> 9) + 0.5) * 2**-23, (b & 0x7FFFFF) * 2**-23, 1 - 2 * (b >> 31)
    turn = math.cos if lane % 2 == 0 else math.sin
    return sign * math.sqrt(-2 * math.log(u1)) * turn(math.pi * v)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("offset", [0, 4096 * 7 + 1020, (1 << 40) - 10])
def test_layout_is_the_documented_one(distribution: str, offset: int) -> None:
    draw = dict(seed=SEED, step=3_000_000_000, direction=5, distribution=distribution)
    z = draw_noise(3100, offset=offset, **draw)
    for i in [*range(40), *range(1000, 1040), *range(2040, 2060), *range(3080, 3100)]:
        assert z[i].item() == pytest.approx(by_the_book(offset + i, **draw), abs=1.5e-5)


def test_the_format_is_frozen() -> None:
    """Runs are replayed from seeds, so these bits may never change, on any machine."""
    offsets = (0, 1024, 2048, 3072, (1 << 35) + 5000)
    draws = [draw_noise(1, offset=offset, seed=0x0123456789ABCDEF, step=41, direction=2) for offset in offsets]
    patterns = [z.view(torch.int32).item() & 0xFFFFFFFF for z in draws]
    assert patterns == [0x3FAC3068, 0x3F4D9434, 0xBF2A0DF1, 0x3F26717B, 0xBD94D4E1]


@settings(max_examples=30)
@given(
    offset=st.integers(0, 1 << 43),
    n=st.integers(1, 9000),
    cut=st.integers(0, 9000),
    distribution=st.sampled_from(DISTRIBUTIONS),
)
def test_any_slice_gives_the_same_bits(offset: int, n: int, cut: int, distribution: str) -> None:
    draw = dict(seed=SEED, step=9, direction=1, distribution=distribution)
    whole = draw_noise(n, offset=offset, **draw)
    cut = min(cut, n)
    assert torch.equal(whole[:cut], draw_noise(cut, offset=offset, **draw))
    assert torch.equal(whole[cut:], draw_noise(n - cut, offset=offset + cut, **draw))
    some = torch.arange(cut // 2, n, 97)
    assert torch.equal(whole[some], noise_at_reference(offset + some, **draw))


def test_chunks_and_threads_do_not_show() -> None:
    draw = dict(seed=1, step=2)
    offset = CHUNK - 5000
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = draw_noise(CHUNK + 10_000, offset=offset, **draw)
        torch.set_num_threads(3)
        assert torch.equal(one, draw_noise(CHUNK + 10_000, offset=offset, **draw))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[4000:6000], draw_noise(2000, offset=offset + 4000, **draw))
    assert torch.equal(one[-7000:], draw_noise(7000, offset=offset + CHUNK + 3000, **draw))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("offset", "n"), ODD_SPANS)
def test_kernel_equals_reference(kernel_device: torch.device, distribution: str, offset: int, n: int) -> None:
    draw = dict(offset=offset, seed=SEED, step=4_000_000_000, direction=65_535, distribution=distribution)
    with force("kernel"):
        made = draw_noise(n, **draw, device=kernel_device)
    assert torch.equal(made.cpu(), draw_noise(n, **draw))


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_gpu_equals_cpu_on_millions(cuda: torch.device, distribution: str) -> None:
    draw = dict(offset=(1 << 33) + 4097, seed=SEED, step=77, direction=1, distribution=distribution)
    assert torch.equal(draw_noise(1 << 22, **draw, device=cuda).cpu(), draw_noise(1 << 22, **draw))


def test_gaussian_distribution_function() -> None:
    """The empirical distribution function of a million draws is within the Kolmogorov bound (p = 1e-4)."""
    n = 1 << 20
    z = draw_noise(n, offset=0, seed=4, step=2).double().sort().values
    expected = 0.5 * torch.erfc(-z / math.sqrt(2))
    steps = torch.arange(1, n + 1).double() / n
    assert (steps - expected).abs().max() < 2.23 / math.sqrt(n)
