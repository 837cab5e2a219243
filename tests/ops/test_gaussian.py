"""Box-Muller: accuracy against float64, and the same bits in kernel and reference."""

import math

import pytest
import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.gaussian import gaussian_pair, gaussian_pair_reference, radius_reference, sine_reference

EDGES = [0, 1, 255, 256, 511, 0x7FFFFFFF, 0x80000000, 0xB504F300, 0xB504F3FF, 0xFFFFFEFF, 0xFFFFFFFF]


def words(n: int, seed: int) -> torch.Tensor:
    """Random 32-bit words with the edge cases in front, held in int32."""
    random = torch.randint(0, 1 << 32, (n,), generator=torch.Generator().manual_seed(seed))
    random[: len(EDGES)] = torch.tensor(EDGES)
    return random.to(torch.int32)


def exact_pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in float64."""
    u1 = (((a.long() & 0xFFFFFFFF) >> 8) + 1).double() * 2**-24
    u2 = ((b.long() & 0xFFFFFFFF) >> 8).double() * 2**-24
    r = (-2 * u1.log()).sqrt()
    return r * (2 * math.pi * u2).cos(), r * (2 * math.pi * u2).sin()


def test_radius_is_accurate_everywhere() -> None:
    """Every 37th of the 2^24 possible radii, and both ends, are within 5e-7 of sqrt(-2 ln u)."""
    m = torch.cat([torch.arange(0, 1 << 24, 37), torch.arange(100), (1 << 24) - 1 - torch.arange(100)])
    exact = (-2 * ((m + 1).double() * 2**-24).log()).sqrt()
    error = (radius_reference((m << 8).to(torch.int32)).double() - exact).abs()
    assert error.max() < 5e-7
    assert error[-100:].max() < 2e-9  # near u = 1, where r goes to 0


def test_sine_is_accurate_everywhere() -> None:
    """sin(pi c) is within 1.6e-7 on a grid over [-1/2, 1/2], odd, and exact at 0."""
    c = torch.arange(-(1 << 22), (1 << 22) + 1, 31).double() * 2**-23
    s = sine_reference(c.float())
    assert (s.double() - (math.pi * c).sin()).abs().max() < 1.6e-7
    assert torch.equal(sine_reference(-c.float()), -s)
    assert sine_reference(torch.zeros(1)) == 0


def test_pair_follows_the_definition() -> None:
    """z_even and z_odd are within 1.2e-6 of the float64 Box-Muller of the same words, 5e-8 on average."""
    a, b = words(1 << 18, seed=0), words(1 << 18, seed=1).flip(0)
    for z, exact in zip(gaussian_pair_reference(a, b), exact_pair(a, b), strict=True):
        assert (z.double() - exact).abs().max() < 1.2e-6
        assert (z.double() - exact).abs().mean() < 5e-8


@jit()
def _pair_kernel(a_ptr, b_ptr, even_ptr, odd_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + at).to(tl.uint32, bitcast=True), tl.load(b_ptr + at).to(tl.uint32, bitcast=True)
    even, odd = gaussian_pair(a, b)
    tl.store(even_ptr + at, even)
    tl.store(odd_ptr + at, odd)


def kernel_pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By kernel, on the device of the words."""
    even, odd = (torch.empty_like(a, dtype=torch.float32) for _ in range(2))
    _pair_kernel[(a.numel() // 1024,)](a, b, even, odd, BLOCK=1024, enable_fp_fusion=False)
    return even, odd


def test_kernel_equals_reference_bit_for_bit(kernel_device: torch.device) -> None:
    """Own polynomials, no fused multiply-add: the kernel makes the reference's bits, edge words included."""
    a, b = words(4096, seed=2), words(4096, seed=3).flip(0)
    made = kernel_pair(a.to(kernel_device), b.to(kernel_device))
    for z, expected in zip(made, gaussian_pair_reference(a, b), strict=True):
        assert torch.equal(z.cpu().view(torch.int32), expected.view(torch.int32))


@pytest.mark.gpu
def test_gpu_equals_cpu_for_every_radius_and_angle(cuda: torch.device) -> None:
    """All 2^24 values of u1 (hence of the hand-made square root) and of u2 give the CPU's bits on the GPU."""
    every = (torch.arange(1 << 24) << 8).to(torch.int32)
    other = words(1 << 24, seed=4)
    for a, b in ((every, other), (other, every)):
        made = kernel_pair(a.to(cuda), b.to(cuda))
        for z, expected in zip(made, gaussian_pair_reference(a, b), strict=True):
            assert torch.equal(z.cpu().view(torch.int32), expected.view(torch.int32))
