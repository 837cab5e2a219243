"""Gathered rows: bit for bit what the whole table would give."""

from dataclasses import replace

import pytest
import torch

from keyhole.ops import ZOStep, zo_flat_, zo_rows
from keyhole.ops.backend import force

SEED, UPDATE_STEP, STEP = 0x0123456789ABCDEF, 6, 7

# dtype, dtype of plus and minus, directions, distribution, rounding, weight decay, base of the table, row size
CASES = [
    (torch.bfloat16, torch.bfloat16, 1, "gaussian", "stochastic", 0.0, 0, 64),
    (torch.bfloat16, torch.float32, 3, "rademacher", "nearest", 0.1, (1 << 33) + 4097, 37),
    (torch.float16, torch.float16, 1, "rademacher", "stochastic", 0.1, 12_345, 700),
    (torch.float32, torch.bfloat16, 2, "gaussian", "nearest", 0.1, 8191, 48),
]
V = 100


def setup(case: tuple, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, ZOStep]:
    """A table, row ids (repeated, first, last), its update and perturbation."""
    dtype, _, q, distribution, rounding, decay, offset, H = case
    generator = torch.Generator().manual_seed(H)
    table_VH = (torch.randn(V, H, generator=generator) * 0.02).to(dtype)
    ids_T = torch.tensor([0, V - 1, 7, 7, 42])
    coef = torch.cat([torch.tensor([1e-2]), torch.randn(q, generator=generator)])
    update = ZOStep(offset, SEED, distribution, coef.to(device), UPDATE_STEP, decay, rounding)
    return table_VH.to(device), ids_T.to(device), replace(update, eps=1e-3, step=STEP, direction=1)


ELSE = [(CASES[0], how_else) for how_else in ("first", "device", "no rows")]


@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("case, how_else", [*((case, "") for case in CASES), *ELSE])
def test_rows_equal_the_full_table(kernel_device: torch.device, case: tuple, how_else: str, choice: str) -> None:
    """Rows updated and perturbed on the fly are the rows of the reference's table; also in the first step, which
    has no update, and with both steps as numbers that a kernel reads."""
    table_VH, ids_T, how = setup(case, kernel_device)
    ids_T = ids_T[:0] if how_else == "no rows" else ids_T
    how = read = replace(how, coef=None) if how_else == "first" else how
    if how_else == "device":
        there = [torch.tensor(t, dtype=torch.int32, device=kernel_device) for t in (UPDATE_STEP, STEP)]
        read = replace(how, update_step=there[0], step=there[1])
    rows_TH, out_dtype = table_VH[ids_T], case[1]
    with force(choice):
        plus_TH, minus_TH = zo_rows(rows_TH, ids_T, read, out_dtype)
    assert torch.equal(rows_TH, table_VH[ids_T])  # the stale rows are not touched
    with force("reference"):
        plus_VH, minus_VH = (torch.empty_like(table_VH, dtype=out_dtype) for _ in range(2))
        zo_flat_(table_VH.view(-1), plus_VH.view(-1), minus_VH.view(-1), how)
    assert torch.equal(plus_TH, plus_VH[ids_T])
    assert torch.equal(minus_TH, minus_VH[ids_T])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_equals_cpu_on_a_real_table(cuda: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(0, 50_000, (2048,), generator=generator)
    rows_TH = torch.randn(2048, 768, generator=generator).to(dtype)
    coef = torch.tensor([1e-3, 1.0, -2.0])
    how = ZOStep((1 << 33) + 11, SEED, coef=coef, update_step=3, weight_decay=0.1, eps=1e-3, step=4)
    made = zo_rows(rows_TH.to(cuda), ids_T.to(cuda), replace(how, coef=coef.to(cuda)))
    for a, b in zip(made, zo_rows(rows_TH, ids_T, how), strict=True):
        assert torch.equal(a.cpu(), b)
