"""What is written beside w + eps z: two directions, or a direction and the clean weights, in one pass over w."""

from collections.abc import Callable

import pytest
import torch

from keyhole.ops import ZOStep, draw_noise, zo_flat_, zo_rows
from keyhole.ops.backend import force
from keyhole.ops.fp8 import fp8_decode, fp8_encode_, packed_bytes
from keyhole.ops.zo.element import BESIDE
from keyhole.ops.zo.packed import zo_packed_
from tests.matrix import in_every_run

# The end of a kernel's tile, and a whole one
SEED, STEP, EPS, OFFSET, N, WIDTH = 5, 9, 1e-2, 8192 - 64, 64 + 8192, 64
UNTOUCHED, ROWS = -7.0, torch.tensor([0, 1, 64, 128])


def how(beside: str, distribution: str = "rademacher") -> ZOStep:
    coef = torch.tensor([1e-2, 0.5])
    return ZOStep(OFFSET, SEED, distribution, coef, STEP - 1, 0.1, "stochastic", None, EPS, STEP, 2, beside)


def outputs() -> list[torch.Tensor]:
    return [torch.full((N,), UNTOUCHED) for _ in range(2)]


def weights() -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(1)) * 0.02


def by_flat(beside: str, distribution: str) -> list[torch.Tensor]:
    w, (plus, minus) = weights().bfloat16(), outputs()
    zo_flat_(w, plus, minus, how(beside, distribution))
    return [w.float(), plus, minus]


def by_packed(beside: str, distribution: str) -> list[torch.Tensor]:
    w, (plus, minus) = torch.empty(packed_bytes(N), dtype=torch.uint8), outputs()
    fp8_encode_(weights(), w, offset=0, seed=0, step=0, rounding="nearest")
    zo_packed_(w, N, plus, minus, how(beside, distribution))
    clean = torch.empty(N)
    fp8_decode(w, clean)
    return [clean, plus, minus]


def by_rows(beside: str, distribution: str) -> list[torch.Tensor]:
    rows = weights().bfloat16().view(-1, WIDTH)[ROWS]
    plus, minus = zo_rows(rows, ROWS, how(beside, distribution), torch.float32)
    minus = torch.full_like(minus, UNTOUCHED) if beside == "nothing" else minus
    with force("reference"):  # its own outputs are compared; the weights after the update are those of by_flat
        return [of_rows(by_flat(beside, distribution)[0]), plus.flatten(), minus.flatten()]


def of_rows(flat: torch.Tensor) -> torch.Tensor:
    """Of some rows: the interpreter takes its time for each."""
    return flat.view(-1, WIDTH)[ROWS].flatten()


@in_every_run(lambda op, beside, distribution: distribution == "gaussian" or (op is by_flat and beside == "minus"))
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("op", [by_flat, by_packed, by_rows])
def test_the_second_output(op: Callable, beside: str, distribution: str) -> None:
    with force("reference"):
        w, plus, minus = op(beside, distribution)
    where = {"offset": OFFSET, "seed": SEED, "step": STEP, "distribution": distribution}
    part = of_rows if op is by_rows else torch.clone
    z, z_next = (part(draw_noise(N, direction=i, **where)) for i in (2, 3))
    eps = torch.tensor(EPS)
    second = {"minus": w - eps * z, "next": w + eps * z_next, "clean": w, "nothing": torch.full_like(w, UNTOUCHED)}
    assert torch.equal(plus, w + eps * z) and torch.equal(minus, second[beside])
    with force("kernel"):
        again = op(beside, distribution)
    assert all(torch.equal(a, b) for a, b in zip(again, (w, plus, minus), strict=True))
