"""The fused SGD update: torch's SGD, the definition, the kernel, the counters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.ops.backend import force
from keyhole.ops.rounding.bits import bits_at_reference
from keyhole.ops.rounding.round import stochastic_round_reference
from keyhole.ops.rounding.store import ALL_ROUNDINGS
from keyhole.ops.sgd import sgd_update_, sum_squares_
from tests.ops.conftest import kernel_device_or_skip

SEED, STEP = 0xDEADBEEFCAFEBABE, 4_000_000_000
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(n: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    w, grad = torch.randn(2, n, generator=generator)
    return (w * 0.02).to(dtype), grad.to(grad_dtype)


def run(w: torch.Tensor, grad: torch.Tensor, rounding: str, steps: int = 2, **settings) -> dict[str, torch.Tensor]:
    """Everything that comes out of a few steps, on the CPU."""
    w, device = w.clone(), w.device
    out = {"w": w, "sum_squares": torch.zeros((), device=device)}
    out["bad"] = torch.zeros((), dtype=torch.int32, device=device)
    out["changed"] = torch.zeros((), dtype=torch.int64, device=device)
    if rounding == "kahan":
        out["compensation"] = torch.zeros_like(w)
    if "scale" in settings:
        settings["scale"] = settings["scale"].to(device)
    counters = {name: out.get(name) for name in ("sum_squares", "bad", "changed", "compensation")}
    for i in range(steps):
        sgd_update_(w, grad, rounding=rounding, seed=SEED, step=STEP + i, **counters, **settings)
    return {name: value.cpu() for name, value in out.items()}


def assert_same(made: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, but for the order in which squares are added."""
    torch.testing.assert_close(made.pop("sum_squares"), expected.pop("sum_squares"), rtol=1e-5, atol=0, equal_nan=True)
    for name, value in expected.items():
        assert made[name].dtype == value.dtype and torch.equal(made[name], value), name


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_sgd_bit_for_bit(weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(37, 131, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.SGD([theirs], lr=1.0, weight_decay=weight_decay)
    for i in range(20):
        lr = optimizer.param_groups[0]["lr"] = 0.1 / (i + 3)
        grad = theirs.grad = torch.randn(37, 131, generator=generator)
        optimizer.step()
        sgd_update_(ours, grad, lr=lr, weight_decay=weight_decay, offset=11, rounding="stochastic")
    assert torch.equal(ours, theirs)


def test_is_the_definition() -> None:
    """Scale, then clip, then decay, then the step, then one stochastic rounding by element index."""
    w, grad = tensors(5000, torch.bfloat16, torch.float16)
    scale, offset = torch.tensor(0.37), (1 << 33) + 4099
    made = run(w, grad, "stochastic", 1, lr=0.02, weight_decay=0.1, scale=scale, clip_value=0.25, offset=offset)
    g = (grad.float() * scale).clamp(-0.25, 0.25).double() + 0.1 * w.double()
    x = (w.double() - 0.02 * g.float().double()).float()
    bits = bits_at_reference(offset + torch.arange(5000), seed=SEED, step=STEP)
    expected = stochastic_round_reference(x, bits, torch.bfloat16)
    assert (made["w"] != expected).float().mean() < 1e-3  # double rounding of g may differ in the last place
    torch.testing.assert_close(made["w"], expected, rtol=2**-7, atol=0)
    torch.testing.assert_close(made["sum_squares"], (grad.float() * scale).square().sum())
    assert made["changed"] == (made["w"] != w).sum() and made["bad"] == 0


def test_kahan_recurrence() -> None:
    w, grad = tensors(4000, torch.bfloat16, torch.bfloat16)
    made = run(w, grad, "kahan", 3, lr=1e-4)
    c = torch.zeros_like(w)
    for _ in range(3):
        y = c.float().add(grad.float(), alpha=-1e-4)
        t = (w.float() + y).bfloat16()
        w, c = t, (y - (t.float() - w.float())).bfloat16()
    assert torch.equal(made["w"], w) and torch.equal(made["compensation"], c)


HOW = {
    "rounding": st.sampled_from(ALL_ROUNDINGS),
    "weight_decay": st.sampled_from([0.0, 0.1]),
    "clip_value": st.sampled_from([None, 0.1]),
    "offset": st.sampled_from([0, 8, 8 * 1001, 8189, (1 << 33) + 12_347, (1 << 43) + 5]),
}
SCALED = {"scale": st.just(torch.tensor(0.37))}


@settings(max_examples=10)
@given(
    n=st.integers(1, 12_000),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    how=st.fixed_dictionaries(HOW, optional=SCALED),
    poison=st.booleans(),
)
def test_kernel_equals_reference(n: int, dtypes: tuple, how: dict, poison: bool) -> None:
    device = kernel_device_or_skip()
    w, grad = tensors(n, *dtypes)
    if poison:
        grad[n // 2], grad[0] = float("nan"), float("-inf")
    with force("kernel"):
        made = run(w.to(device), grad.to(device), lr=0.01, **how)
    with force("reference"):
        assert_same(made, run(w, grad, lr=0.01, **how))


@pytest.mark.parametrize("choice", ["reference", "kernel"])
def test_bad_gradients_leave_their_weights(kernel_device: torch.device, choice: str) -> None:
    grad = torch.tensor([1.0, float("inf"), float("nan"), 3e38, -2.0], device=kernel_device)
    w, c = torch.ones(5, device=kernel_device), torch.full((5,), 0.25, device=kernel_device)
    bad = torch.zeros((), dtype=torch.int32, device=kernel_device)
    with force(choice):
        sgd_update_(
            w, grad, lr=0.5, scale=torch.tensor(2.0, device=kernel_device), rounding="kahan", compensation=c, bad=bad
        )
    assert w.tolist() == [0.25, 1.0, 1.0, 1.0, 3.25] and c.tolist() == [0.0, 0.25, 0.25, 0.25, 0.0] and bad == 1


@pytest.mark.parametrize("choice", ["reference", "kernel"])
def test_sum_of_squares_alone_is_the_one_of_the_update(kernel_device: torch.device, choice: str) -> None:
    w, grad = tensors(30_000, torch.bfloat16, torch.bfloat16)
    w, grad = w.to(kernel_device), grad.to(kernel_device)
    scale = torch.tensor(0.37, device=kernel_device)
    sums = torch.full((3,), 5.0, device=kernel_device)
    bad = torch.zeros((), dtype=torch.int32, device=kernel_device)
    with force(choice):
        sgd_update_(w, grad, lr=0.0, scale=scale, sum_squares=sums[0], offset=123)
        sum_squares_(grad, sums[1], scale, bad, offset=123)
        sum_squares_(grad, sums[2], scale, bad, offset=123)
    assert sums[0] == sums[1] == sums[2] and bad == 0
    torch.testing.assert_close(sums[0].cpu(), 5 + (grad.cpu().double() * 0.37).square().sum().float())
    with force(choice):
        sum_squares_(grad / 0, sums[0], None, bad, offset=0)
    assert bad == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ALL_ROUNDINGS)
def test_gpu_equals_cpu_on_millions(cuda: torch.device, dtype: torch.dtype, rounding: str) -> None:
    w, grad = tensors((1 << 21) + 8, dtype, torch.bfloat16)
    grad[12345] = float("inf")
    same = dict(lr=0.01, weight_decay=0.1, clip_value=0.5, scale=torch.tensor(0.37))
    for offset in ((1 << 33) + 8, (1 << 33) + 4099):
        made = run(w.to(cuda), grad.to(cuda), rounding, offset=offset, **same)
        assert_same(made, run(w, grad, rounding, offset=offset, **same))


@pytest.mark.gpu
def test_gpu_tensor_of_more_than_2_31_elements(cuda: torch.device) -> None:
    n = (1 << 31) + 40_000
    w, grad = (torch.ones(n, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    changed, squares = torch.zeros((), dtype=torch.int64, device=cuda), torch.zeros((), device=cuda)
    sgd_update_(w, grad, lr=0.5, rounding="stochastic", offset=16, changed=changed, sum_squares=squares)
    assert changed == n and abs(squares / n - 1) < 1e-6
    assert (w[:20_000] == 0.5).all() and (w[-20_000:] == 0.5).all()
