"""AdaLomo's update: a reference written again from the paper, the kernels, the counters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.ops.adalomo import adalomo_state, adalomo_update_
from keyhole.ops.backend import force
from keyhole.ops.rounding.store import ALL_ROUNDINGS
from tests.ops.conftest import kernel_device_or_skip

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Textbook:
    """Adafactor without momentum in float64, one matrix or vector, as published."""

    def __init__(self, w: torch.Tensor) -> None:
        self.w, self.t, self.v, self.row, self.col = w.double(), 0, 0.0, 0.0, 0.0

    def step(self, grad: torch.Tensor, lr: float, weight_decay: float) -> None:
        self.t += 1
        beta, g = 1 - self.t**-0.8, grad.double()
        moment = g**2 + 1e-30
        if g.dim() == 1:
            self.v = beta * self.v + (1 - beta) * moment
            u = g / self.v.sqrt()
        else:
            self.row = beta * self.row + (1 - beta) * moment.mean(1)
            self.col = beta * self.col + (1 - beta) * moment.mean(0)
            v = torch.outer(self.row, self.col) / self.row.mean()  # the non-negative rank-1 factorisation
            u = g / v.sqrt()
        u = u / max(1.0, u.norm().item() / math.sqrt(u.numel()))
        a = lr * max(1e-3, self.w.norm().item() / math.sqrt(self.w.numel()))
        self.w = self.w * (1 - a * weight_decay) - a * u


def run(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rounding: str,
    device: torch.device,
    steps: int = 2,
    offset: int = 12_345,
    poison: bool = False,
) -> dict[str, torch.Tensor]:
    """Everything that comes out of a few steps, on the CPU."""
    generator = torch.Generator().manual_seed(sum(shape))
    w = (torch.randn(shape, generator=generator) * 0.02).to(dtype).to(device)
    out = {"w": w, "sum_squares": torch.zeros((), device=device), **adalomo_state(shape, device)}
    state = {name: out[name] for name in ("row", "col", "v") if name in out}
    out["bad"] = torch.zeros((), dtype=torch.int32, device=device)
    out["changed"] = torch.zeros((), dtype=torch.int64, device=device)
    if rounding == "kahan":
        out["compensation"] = torch.zeros_like(w)
    counters = {name: out.get(name) for name in ("sum_squares", "bad", "changed", "compensation")}
    for t in range(1, steps + 1):
        grad = torch.randn(shape, generator=generator).bfloat16()
        if poison and t == steps:
            grad.view(-1)[grad.numel() // 2] = float("inf")
        adalomo_update_(
            w,
            grad.to(device),
            state,
            lr=0.05,
            t=t,
            weight_decay=0.1,
            rounding=rounding,
            offset=offset,
            scale=torch.tensor(0.37, device=device),
            seed=7,
            step=t,
            **counters,
        )
    return {name: value.cpu() for name, value in out.items()}


def assert_close(made: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Sums differ in their last bits, so a stored value may rarely round to its neighbour."""
    spacing = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[expected["w"].dtype]
    for name in ("sum_squares", "row", "col", "v"):
        if name in expected:
            torch.testing.assert_close(made[name], expected[name], rtol=1e-5, atol=0, equal_nan=True)
    nearby = 1e-7 if expected["w"].dtype == torch.float32 else spacing * float(expected["w"].abs().max())
    torch.testing.assert_close(made["w"], expected["w"], rtol=spacing, atol=nearby)
    if expected["w"].dtype != torch.float32:
        assert (made["w"] != expected["w"]).float().mean() <= 1e-3 + 1.5 / expected["w"].numel()
    assert abs(made["changed"] - expected["changed"]) <= 1 + 1e-3 * expected["w"].numel()
    assert made["bad"] == expected["bad"]


@pytest.mark.parametrize("shape", [(24, 40), (1, 9), (9, 1), (33,), (1,)])
def test_reference_is_the_published_rule(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(shape, generator=generator) * 0.02
    textbook, state = Textbook(w), adalomo_state(shape, "cpu")
    for t in range(1, 6):
        grad = torch.randn(shape, generator=generator) * 10.0**-t
        textbook.step(grad, 0.05, 0.1)
        adalomo_update_(w, grad, state, lr=0.05, t=t, weight_decay=0.1)
        torch.testing.assert_close(w.double(), textbook.w, rtol=1e-6, atol=1e-8)


@settings(max_examples=7)
@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 3000)),
        st.tuples(st.integers(1, 80), st.integers(1, 300)),
        st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 140)),
    ),
    dtype=st.sampled_from(DTYPES),
    rounding=st.sampled_from(ALL_ROUNDINGS),
    poison=st.booleans(),
    offset=st.sampled_from([0, 8, 8189, (1 << 33) + 12_347]),
)
def test_kernel_equals_reference(
    shape: tuple[int, ...], dtype: torch.dtype, rounding: str, poison: bool, offset: int
) -> None:
    device = kernel_device_or_skip()
    with force("kernel"):
        made = run(shape, dtype, rounding, device, offset=offset, poison=poison)
    with force("reference"):
        assert_close(made, run(shape, dtype, rounding, torch.device("cpu"), offset=offset, poison=poison))


@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("shape", [(70,), (30, 50), (2, 20, 30)])
def test_bad_gradient_leaves_the_tensor(kernel_device: torch.device, choice: str, shape: tuple[int, ...]) -> None:
    """One inf in the last of three gradients: weights, state and compensation stay those after two; the flag is up."""
    with force(choice):
        two = run(shape, torch.bfloat16, "kahan", kernel_device, steps=2)
        three = run(shape, torch.bfloat16, "kahan", kernel_device, steps=3, poison=True)
    assert two["bad"] == 0 and three["bad"] == 1 and not torch.isfinite(three["sum_squares"])
    assert all(torch.equal(three[name], two[name]) for name in two if name not in ("bad", "sum_squares"))


@pytest.mark.parametrize("choice", ["reference", "kernel"])
def test_stack_is_factored_by_matrix_and_normalised_as_one(kernel_device: torch.device, choice: str) -> None:
    generator = torch.Generator().manual_seed(1)
    w, grad = torch.randn(2, 3, 20, 30, generator=generator).to(kernel_device)
    stacked, state = w.clone(), adalomo_state(w.shape, kernel_device)
    singles = [adalomo_state((20, 30), kernel_device) for _ in range(3)]
    with force(choice):
        adalomo_update_(stacked, grad, state, lr=0.1, t=1, clip_threshold=1e9)
        for e in range(3):
            adalomo_update_(w[e].clone(), grad[e], singles[e], lr=0.1, t=1)
    torch.testing.assert_close(state["row"], torch.stack([s["row"] for s in singles]))
    torch.testing.assert_close(state["col"], torch.stack([s["col"] for s in singles]))
    row, col = state["row"].cpu(), state["col"].cpu()
    u = grad.cpu() * (row / row.mean(-1, keepdim=True)).rsqrt()[..., None] * col.rsqrt()[..., None, :]
    expected = w.cpu() - 0.1 * w.cpu().square().mean().sqrt() * u
    torch.testing.assert_close(stacked.cpu(), expected)


def test_zero_gradient_is_no_step() -> None:
    for shape in ((5,), (4, 6)):
        w, state = torch.ones(shape), adalomo_state(shape, "cpu")
        adalomo_update_(w, torch.zeros(shape), state, lr=0.1, t=1)
        assert torch.equal(w, torch.ones(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1024), (8, 512, 700), (50_003,), (1, 3_000_000), (65_537 * 64, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_equals_cpu_on_millions(cuda: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = run(shape, dtype, "stochastic", cuda)
    again = run(shape, dtype, "stochastic", cuda)
    assert all(torch.equal(made[name], again[name]) for name in made)
    assert_close(made, run(shape, dtype, "stochastic", torch.device("cpu")))
