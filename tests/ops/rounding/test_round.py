"""Stochastic rounding: exactly unbiased, exact values kept, and the same in kernel and reference."""

import pytest
import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.rounding.round import round_nearest, round_stochastic, stochastic_round_reference
from keyhole.ops.rounding.store import ALL_ROUNDINGS, Store

HALVES = [torch.bfloat16, torch.float16]
EVERY_DRAW = torch.arange(1 << 16, dtype=torch.int32)
INF = float("inf")


def every_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("x", [1.0001, -0.3337, 3.0e-3, -1234.56, 6.2e-5, -7.77e-5])
def test_mean_over_all_draws_is_exact(dtype: torch.dtype, x: float) -> None:
    value = torch.full((1 << 16,), x)
    rounded = stochastic_round_reference(value, EVERY_DRAW, dtype)
    assert rounded.double().mean() == value[0].double()
    assert rounded.unique().numel() == 2  # the neighbours on either side


@pytest.mark.parametrize("x", [5.0e-5, -1.7e-5, 3.3e-7, 1.0e-8, -2.0e-8, 1.0e-12])
def test_float16_subnormals_are_unbiased_to_the_bits_drawn(x: float) -> None:
    """Below 2^-14 the bias is at most 2^-17 of a grid step, and the result is a neighbour on the grid."""
    value, step = torch.full((1 << 16,), x), 2.0**-24
    rounded = stochastic_round_reference(value, EVERY_DRAW, torch.float16).double()
    assert abs(rounded.mean() - value[0].double()) <= step * 2.0**-17
    assert (rounded - value.double()).abs().max() < step


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [0, 1, 0x8000, 0xFFFF])
def test_exact_values_stay(dtype: torch.dtype, bits: int) -> None:
    values = every_value(dtype)
    values = values[~values.isnan()]
    drawn = torch.full(values.shape, bits, dtype=torch.int32)
    rounded = stochastic_round_reference(values.float(), drawn, dtype)
    assert torch.equal(rounded.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
def test_nan_stays_and_overflow_goes_to_inf(dtype: torch.dtype) -> None:
    nan = torch.full((1 << 16,), float("nan"))
    assert stochastic_round_reference(nan, EVERY_DRAW, dtype).isnan().all()
    top = torch.finfo(dtype).max
    beyond = torch.full((1 << 16,), top * (1 + 2**-13 if dtype == torch.float16 else 1 + 2**-10))
    outcomes = stochastic_round_reference(beyond, EVERY_DRAW, dtype).float().unique()
    assert outcomes.tolist() == [top, INF]


@jit()
def _round_kernel(x_ptr, bits_ptr, stochastic_ptr, nearest_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, bits = tl.load(x_ptr + at), tl.load(bits_ptr + at).to(tl.uint32)
    tl.store(stochastic_ptr + at, round_stochastic(x, bits, stochastic_ptr.dtype.element_ty))
    tl.store(nearest_ptr + at, round_nearest(x, nearest_ptr.dtype.element_ty))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, about inf
@pytest.mark.parametrize("dtype", HALVES)
def test_kernel_equals_reference(kernel_device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 8192
    x = torch.randint(-(1 << 31), 1 << 31, (n,), generator=generator).to(torch.int32).view(torch.float32)
    x = torch.where(x.isnan(), torch.randn(n, generator=generator), x)
    x[: n // 2] = torch.randn(n // 2, generator=generator) * torch.logspace(-9, 5, n // 2)
    x[:4] = torch.tensor([INF, -INF, 0.0, -0.0])
    half_step = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
    x[4:1028] = every_value(dtype)[20_000:21_024].float() * (1 + half_step)
    bits = torch.randint(0, 1 << 16, (n,), generator=generator).to(torch.int32)
    stochastic, nearest = (torch.empty(n, dtype=dtype, device=kernel_device) for _ in range(2))
    _round_kernel[(n // 1024,)](
        x.to(kernel_device), bits.to(kernel_device), stochastic, nearest, BLOCK=1024, enable_fp_fusion=False
    )
    expected = stochastic_round_reference(x, bits, dtype)
    assert torch.equal(stochastic.cpu().view(torch.int16), expected.view(torch.int16))
    assert torch.equal(nearest.cpu().view(torch.int16), x.to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
def test_kernel_keeps_nan(kernel_device: torch.device, dtype: torch.dtype) -> None:
    """The nans that arithmetic makes (0x7FFFFFFF on NVIDIA) stay nan under every draw."""
    for pattern in (0x7FFFFFFF, 0x7FC00000, -0x400000):
        x = torch.full((1 << 16,), pattern, dtype=torch.int32).view(torch.float32).to(kernel_device)
        made = [torch.empty(1 << 16, dtype=dtype, device=kernel_device) for _ in range(2)]
        _round_kernel[(64,)](x, EVERY_DRAW.to(kernel_device), *made, BLOCK=1024, enable_fp_fusion=False)
        assert made[0].isnan().all()


@pytest.mark.parametrize("rounding", ALL_ROUNDINGS)
def test_only_stochastic_rounding_to_16_bits_draws(rounding: str) -> None:
    needs = {dtype: Store(rounding).is_stochastic(dtype) for dtype in (*HALVES, torch.float32)}
    assert needs == {dtype: rounding == "stochastic" and dtype != torch.float32 for dtype in needs}
