"""W + A V^T in place: kernel and reference give the same bits, whole or in parts, and round as told."""

import pytest
import torch

from keyhole.ops.backend import force
from keyhole.ops.lowrank.fold import fold_
from tests.matrix import in_every_run

HOW = {"offset": (1 << 33) + 4096, "seed": 0xDEADBEEFCAFEBABE, "step": 4_000_000_000}


def problem(rows: int, columns: int, rank: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """w, a, v."""
    draw = torch.Generator().manual_seed(rows + columns)
    w, a = torch.randn(rows, columns, generator=draw), 1e-3 * torch.randn(rank, rows, generator=draw)
    v = torch.randn(rank, columns, generator=draw)
    return [w.to(device, dtype), a.to(device), v.to(device, dtype)]


@in_every_run(lambda dtype, rounding: dtype == torch.bfloat16 or (rounding == "nearest") == (dtype == torch.float32))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_kernel_equals_reference(kernel_device: torch.device, dtype: torch.dtype, rounding: str) -> None:
    found = []
    for choice in ("reference", "kernel"):
        w, a, v = problem(150, 140, 3, dtype, kernel_device)
        changed = torch.zeros((), dtype=torch.int64, device=kernel_device)
        with force(choice):
            fold_(w, a, v, **HOW, rounding=rounding, changed=changed)
        found.append((w, int(changed)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] > 0


def test_parts_have_the_bits_of_the_whole() -> None:
    w, a, v = problem(300, 40, 2, torch.bfloat16, torch.device("cpu"))
    tail = w[256:].clone()
    fold_(w, a, v, **HOW, rounding="stochastic")
    fold_(tail, a[:, 256:].contiguous(), v, **HOW, rounding="stochastic", first_row=256)
    assert torch.equal(tail, w[256:])


def test_stochastic_rounding_is_right_on_average() -> None:
    means = {}
    for rounding in ("stochastic", "nearest"):
        w = torch.ones(512, 256, dtype=torch.bfloat16)
        fold_(w, torch.full((1, 512), 1e-4), torch.ones(1, 256), seed=3, rounding=rounding)
        means[rounding] = float(w.float().mean()) - 1
    assert means["nearest"] == 0 and means["stochastic"] == pytest.approx(1e-4, rel=0.1)
