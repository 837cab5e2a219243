"""The grids of frozen weights: nearest of their levels, exact on them, and the same bits from kernel and reference."""

import pytest
import torch

from keyhole.ops import lowbit
from keyhole.ops.arguments import DTYPES
from keyhole.ops.backend import force
from keyhole.ops.lowbit import NF4, Grid

GRIDS = [Grid(name, group) for name in ("int8", "int4", "nf4") for group in (64, 32)]
GRIDS.append(Grid("nf4", 64, "float32"))
WITH_OFFSETS = [Grid("int4", 32, "float16", True), Grid("int4", 64, "float32", True)]
LEVELS = {"int8": torch.arange(-127, 128).float(), "int4": torch.arange(-8, 8).float(), "nf4": torch.tensor(NF4)}


def samples(groups: int, size: int, seed: int = 0) -> torch.Tensor:
    """Groups of every magnitude that a float16 scale can hold and a little beyond, with zeros and ties."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(groups, size, generator=generator) * torch.logspace(-11, 6, groups).unsqueeze(1)
    w[torch.rand(groups, size, generator=generator) < 0.05] = 0.0
    w[3] = 0.0
    w[4, ::2] = -0.0
    w[4, 1::2] = 0.0
    w[5] = torch.arange(size) % 17 - 8.0  # int4: its largest is -8, and all but 8 are levels
    w[6] = torch.arange(size) % 16 - 7.5  # halfway between integers
    return w.view(-1)


def pack(w: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full((grid.code_bytes(w.numel()),), 0xEE, dtype=torch.uint8, device=w.device)
    scales = torch.full((grid.scale_count(w.numel()),), 7.0, dtype=grid.scale_dtype, device=w.device)
    lowbit.lowbit_encode_(w, codes, scales, grid)
    return codes, scales


def unpack(codes: torch.Tensor, scales: torch.Tensor, grid: Grid, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((codes.numel() * (1 if grid.name == "int8" else 2),), 7.0, dtype=dtype, device=codes.device)
    lowbit.lowbit_decode(codes, scales, out, grid)
    return out


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_kernel_and_reference_give_the_same_bits(grid: Grid, kernel_device: torch.device) -> None:
    w = samples(71, grid.group)
    with force("reference"):
        codes, scales = pack(w, grid)
        values = {dtype: unpack(codes, scales, grid, dtype) for dtype in DTYPES}
    with force("kernel"):
        found = pack(w.to(kernel_device), grid)
        assert torch.equal(found[0].cpu(), codes)
        assert torch.equal(found[1].cpu().view(torch.uint8), scales.view(torch.uint8))
        for dtype, expected in values.items():
            same = unpack(*found, grid, dtype).cpu()
            assert torch.equal(same.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("grid", WITH_OFFSETS, ids=str)
def test_a_grid_with_offsets_means_s_q_plus_m(grid: Grid, kernel_device: torch.device) -> None:
    """Scales and offsets of either sign and every magnitude, by the definition, element by element: reference and
    kernel, in every dtype, of a number of groups that fills no whole program."""
    groups, generator = 71, torch.Generator().manual_seed(0)
    q_GE = torch.randint(0, 16, (groups, grid.group), generator=generator)
    pairs_G2 = torch.randn(groups, 2, generator=generator) * torch.logspace(-7, 4, groups).unsqueeze(1)
    pairs_G2[3] = 0.0
    scales = pairs_G2.to(grid.scale_dtype).view(-1)
    assert q_GE.numel() // 2 + scales.nbytes == q_GE.numel() * grid.bytes_per_element == 0.625 * q_GE.numel()
    low, high = q_GE.to(torch.uint8).split(grid.group // 2, dim=1)
    codes = (low | (high << 4)).reshape(-1)
    s_G1, m_G1 = scales.view(-1, 2).double().split(1, dim=1)
    exact = ((s_G1 * q_GE).float() + m_G1.float()).view(-1)  # s q is exact where s is of float16
    for dtype in DTYPES:
        with force("reference"):
            assert torch.equal(unpack(codes, scales, grid, dtype), exact.to(dtype))
        with force("kernel"):
            found = unpack(codes.to(kernel_device), scales.to(kernel_device), grid, dtype).cpu()
        assert torch.equal(found.view(torch.uint8), exact.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_weight_goes_to_the_nearest_level(grid: Grid) -> None:
    w = samples(71, grid.group)
    codes, scales = pack(w, grid)
    levels_L = LEVELS[grid.name].double()
    held_GL = scales.double().unsqueeze(1) * levels_L
    distance_GE = (w.double().view(-1, grid.group).unsqueeze(2) - held_GL.unsqueeze(1)).abs().amin(2)
    found_GE = (unpack(codes, scales, grid).double() - w.double()).view(-1, grid.group).abs()
    slack_GE = 1e-6 * w.double().view(-1, grid.group).abs() + 1e-30  # the quotient is rounded
    assert bool((found_GE <= distance_GE + slack_GE).all())
    assert codes.numel() + scales.nbytes == w.numel() * grid.bytes_per_element


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_lies_on_the_grid_comes_back(grid: Grid) -> None:
    """Every level with a scale of float16: to the bit, if the level of the largest magnitude occurs."""
    levels = LEVELS[grid.name]
    picked_GE = levels[torch.randint(len(levels), (40, grid.group), generator=torch.Generator().manual_seed(1))]
    picked_GE[:, 0] = levels[0]
    scales_G1 = torch.logspace(-3, 2, 40).half().float().unsqueeze(1)
    scales_G1[::2] *= -1 if grid.name == "int4" else 1  # its largest number may be positive: no level is lost to that
    w = (picked_GE * scales_G1).view(-1)
    assert torch.equal(unpack(*pack(w, grid), grid), w)
