"""Box-Muller: accuracy against float64, and the same bits in kernel and reference."""

import math

import pytest
import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.noise.gaussian import gaussian_pair, gaussian_pair_reference

EDGES = [0, 1, 511, 512, 1023, 0x3FFFFF, 0x400000, 0x7FFFFFFF, 0x80000000, 0xFFFFFDFF, 0xFFFFFFFF]


def words(n: int, seed: int) -> torch.Tensor:
    """Random 32-bit words with the edge cases in front, held in int32."""
    random = torch.randint(0, 1 << 32, (n,), generator=torch.Generator().manual_seed(seed))
    random[: len(EDGES)] = torch.tensor(EDGES)
    return random.to(torch.int32)


def exact_pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    u1 = (((a.long() & 0xFFFFFFFF) >> 9).double() + 0.5) * 2**-23
    v = (b & 0x7FFFFF).double() * 2**-23
    r = (-2 * u1.log()).sqrt() * torch.where(b < 0, -1, 1)
    return r * (math.pi * v).cos(), r * (math.pi * v).sin()


def test_pair_follows_the_definition() -> None:
    a, b = words(1 << 18, seed=0), words(1 << 18, seed=1).flip(0)
    for z, exact in zip(gaussian_pair_reference(a, b), exact_pair(a, b), strict=True):
        assert (z.double() - exact).abs().max() < 1.5e-5
        assert (z.double() - exact).abs().mean() < 2.2e-6


@jit()
def _pair_kernel(a_ptr, b_ptr, even_ptr, odd_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + at).to(tl.uint32, bitcast=True), tl.load(b_ptr + at).to(tl.uint32, bitcast=True)
    even, odd = gaussian_pair(a, b)
    tl.store(even_ptr + at, even)
    tl.store(odd_ptr + at, odd)


def kernel_pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    even, odd = (torch.empty_like(a, dtype=torch.float32) for _ in range(2))
    _pair_kernel[(a.numel() // 1024,)](a, b, even, odd, BLOCK=1024, enable_fp_fusion=False)
    return even, odd


def test_kernel_equals_reference_bit_for_bit(kernel_device: torch.device) -> None:
    a, b = words(4096, seed=2), words(4096, seed=3).flip(0)
    made = kernel_pair(a.to(kernel_device), b.to(kernel_device))
    for z, expected in zip(made, gaussian_pair_reference(a, b), strict=True):
        assert torch.equal(z.cpu().view(torch.int32), expected.view(torch.int32))


@pytest.mark.gpu
def test_gpu_equals_cpu_for_every_radius_and_angle(cuda: torch.device) -> None:
    """All 2^23 values of u1 (hence of the hand-made square root) and of v give the CPU's bits on the GPU."""
    every = torch.arange(1 << 23)
    radii, angles, other = (every << 9).to(torch.int32), every.to(torch.int32), words(1 << 23, seed=4)
    for a, b in ((radii, other), (other, angles)):
        made = kernel_pair(a.to(cuda), b.to(cuda))
        for z, expected in zip(made, gaussian_pair_reference(a, b), strict=True):
            assert torch.equal(z.cpu().view(torch.int32), expected.view(torch.int32))
