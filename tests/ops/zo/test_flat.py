"""Update and perturbation: the definition, the fusion, the kernel, the counts."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from keyhole.ops import ZOStep, draw_noise, zo_flat_
from keyhole.ops.backend import force
from keyhole.ops.noise.words import WIDTH
from keyhole.ops.rounding.bits import chunk_bits_reference
from keyhole.ops.rounding.round import stochastic_round_reference
from tests.matrix import in_every_run

SEED, UPDATE_STEP, STEP, EPS = 0xDEADBEEFCAFEBABE, 4_000_000_000, 4_000_000_001, 1e-3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# dtype, dtype of plus and minus, directions, distribution, rounding, weight decay, offset, size.
# Together: every dtype, flag and kind of edge (aligned, ragged tail, odd, inside a tile, over two and three, nothing).
CASES = [
    (torch.bfloat16, torch.bfloat16, 1, "gaussian", "stochastic", 0.0, 8192 * 3, 8192),
    (torch.bfloat16, torch.bfloat16, 4, "rademacher", "stochastic", 0.1, (1 << 33) + 12_347, 4100),
    (torch.bfloat16, torch.float32, 1, "rademacher", "nearest", 0.1, 8189, 5),
    (torch.float16, torch.float16, 1, "gaussian", "stochastic", 0.1, 8 * 1001, 9003),
    (torch.float16, torch.float16, 4, "rademacher", "nearest", 0.0, 4096, 4096),
    (torch.float32, torch.bfloat16, 4, "gaussian", "stochastic", 0.0, 1, 8191),
    (torch.float32, torch.float32, 1, "gaussian", "nearest", 0.1, (1 << 43) + 5, 300),
    (torch.bfloat16, torch.bfloat16, 1, "gaussian", "stochastic", 0.1, 8192 * 5 - 192, 8192 + 1000),
    (torch.float16, torch.bfloat16, 1, "rademacher", "stochastic", 0.0, 8192 - 64, 8192 + 128),
    (torch.float32, torch.float32, 1, "gaussian", "nearest", 0.0, 5, 0),
]


def weights(n: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.02).to(dtype)


def coefficients(q: int) -> torch.Tensor:
    return torch.cat([torch.tensor([1e-2]), torch.randn(q, generator=torch.Generator().manual_seed(q))])


def step(w: torch.Tensor, *settings: Any, fused: bool) -> list[torch.Tensor]:
    """[updated w, plus, minus, changed] on the CPU, in one pass or in two."""
    out_dtype, q, distribution, rounding, decay, offset = settings
    w = w.clone()
    plus, minus = (torch.empty_like(w, dtype=out_dtype) for _ in range(2))
    changed = torch.zeros((), dtype=torch.int64, device=w.device)
    coef = coefficients(q).to(w.device)
    how = ZOStep(offset, SEED, distribution, coef, UPDATE_STEP, decay, rounding, changed, EPS, STEP)
    if fused:
        zo_flat_(w, plus, minus, how)
    else:
        zo_flat_(w, None, None, how)
        zo_flat_(w, plus, minus, replace(how, coef=None))
    return [tensor.cpu() for tensor in (w, plus, minus, changed)]


def by_the_book(w: torch.Tensor, *settings: Any) -> list[torch.Tensor]:
    """The same from the definition, with whole tensors and the noise op."""
    out_dtype, q, distribution, rounding, decay, offset = settings
    n, coef = w.numel(), coefficients(q)
    same = dict(offset=offset, seed=SEED, distribution=distribution)
    u = coef[1] * draw_noise(n, step=UPDATE_STEP, direction=0, **same)
    for i in range(1, q):
        u = u + coef[1 + i] * draw_noise(n, step=UPDATE_STEP, direction=i, **same)
    w_fp32 = w.float()
    moved = w_fp32 - coef[0] * (u + decay * w_fp32 if decay else u)
    bits = chunk_bits_reference(offset, n, seed=SEED, step=UPDATE_STEP, device=w.device)
    new = stochastic_round_reference(moved, bits, w.dtype) if rounding == "stochastic" else moved.to(w.dtype)
    move = EPS * draw_noise(n, step=STEP, **same)
    plus, minus = (new.float() + move).to(out_dtype), (new.float() - move).to(out_dtype)
    return [new, plus, minus, (new != w).sum()]


def assert_same_bits(made: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for name, a, b in zip(("w", "plus", "minus", "changed"), made, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize("case", CASES)
def test_reference_is_the_definition(case: tuple) -> None:
    dtype, *settings, offset, n = case
    w = weights(n, dtype)
    assert_same_bits(step(w, *settings, offset, fused=True), by_the_book(w, *settings, offset))


@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_reference(kernel_device: torch.device, case: tuple) -> None:
    dtype, *settings, offset, n = case
    w = weights(n, dtype)
    with force("kernel"):
        made = step(w.to(kernel_device), *settings, offset, fused=True)
    assert_same_bits(made, step(w, *settings, offset, fused=True))


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[5]])
def test_fused_kernel_equals_the_two_in_sequence(kernel_device: torch.device, case: tuple) -> None:
    dtype, *settings, offset, n = case
    w = weights(n, dtype).to(kernel_device)
    with force("kernel"):
        assert_same_bits(step(w, *settings, offset, fused=True), step(w, *settings, offset, fused=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lr", [0.0, 1e-2])
def test_odd_values_are_kept_and_counted(kernel_device: torch.device, dtype: torch.dtype, lr: float) -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-7, -1e-30, 1.0])
    w, coef = odd.to(dtype).repeat(1100), torch.tensor([lr, 0.5])
    changed = [torch.tensor(1000, device=device) for device in ("cpu", kernel_device)]  # is added to
    how = ZOStep(8192 - 304, SEED, update_step=STEP)
    mine, theirs = w.clone(), w.to(kernel_device, copy=True)
    zo_flat_(mine, None, None, replace(how, coef=coef, changed=changed[0]))
    with force("kernel"):
        zo_flat_(theirs, None, None, replace(how, coef=coef.to(kernel_device), changed=changed[1]))
    theirs = theirs.cpu()
    assert torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert int(changed[0]) == int(changed[1]) >= 2100
    if lr == 0:  # a refused step
        assert torch.equal(mine.nan_to_num(7.0), w.nan_to_num(7.0)) and int(changed[0]) == 2100


def test_pieces_equal_the_whole() -> None:
    w, settings = weights(300_000, torch.bfloat16), (torch.bfloat16, 2, "gaussian", "stochastic", 0.1)
    whole = step(w, *settings, 77, fused=True)
    cuts = [0, 1, 4097, 100_000, 262_067, 300_000]
    spans = list(zip(cuts, cuts[1:], strict=False))
    pieces = [step(w[a:b], *settings, 77 + a, fused=True) for a, b in spans]
    joined = [torch.cat([piece[i] for piece in pieces]) for i in range(3)]
    assert_same_bits([*joined, sum(piece[3] for piece in pieces)], whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
def test_gpu_equals_cpu_on_many_tiles(cuda: torch.device, dtype: torch.dtype, distribution: str) -> None:
    w, settings = weights((1 << 18) + 3, dtype), (torch.bfloat16, 2, distribution, "stochastic", 0.1)
    for offset in ((1 << 33) + 8, (1 << 33) + 4099):
        made = step(w.to(cuda), *settings, offset, fused=True)
        assert_same_bits(made, step(w, *settings, offset, fused=True))


@pytest.mark.gpu
def test_gpu_tensor_of_more_than_2_31_elements(cuda: torch.device) -> None:
    n, edge = (1 << 31) + 40_000, 20_000
    w = torch.ones(n, dtype=torch.bfloat16, device=cuda)
    plus, minus = torch.empty_like(w), torch.empty_like(w)
    changed, coef = torch.zeros((), dtype=torch.int64, device=cuda), torch.tensor([0.5, 1.0])
    how = ZOStep(16, SEED, "rademacher", coef, update_step=1, eps=0.1, step=2)
    zo_flat_(w, plus, minus, replace(how, coef=coef.to(cuda), changed=changed))
    assert changed == n  # 1 -> 0.5 or 1.5
    for start in (0, (1 << 31) - edge // 2, n - edge):
        cpu = [torch.ones(edge, dtype=torch.bfloat16) for _ in range(3)]
        zo_flat_(*cpu, replace(how, offset=16 + start))
        for made, expected in zip((w, plus, minus), cpu, strict=True):
            assert torch.equal(made[start : start + edge].cpu(), expected)


@in_every_run(lambda case, choice: choice == "reference" or case is CASES[0])
@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]])
def test_steps_may_be_on_the_device(kernel_device: torch.device, case: tuple, choice: str) -> None:
    dtype, out_dtype, q, distribution, rounding, decay, offset, n = case
    coef = coefficients(q).to(kernel_device)
    on_host = ZOStep(offset, SEED, distribution, coef, UPDATE_STEP, decay, rounding, None, EPS, STEP)
    there = [torch.tensor(t - (1 << 32), dtype=torch.int32, device=kernel_device) for t in (UPDATE_STEP, STEP)]
    on_device = replace(on_host, update_step=there[0], step=there[1])
    with force(choice):
        for drop, perturbs in (({}, True), ({"step": 0}, False), ({"coef": None, "update_step": 0}, True)):
            made = []
            for how in (replace(on_host, **drop), replace(on_device, **drop)):
                w = weights(n, dtype).to(kernel_device)
                outputs = [torch.zeros_like(w, dtype=out_dtype) for _ in range(2)]
                zo_flat_(w, *(outputs if perturbs else (None, None)), how)
                made.append([w, *outputs])
            assert all(map(torch.equal, *made))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_every_edge_of_the_vectors_of_a_tile(kernel_device: torch.device, part: int, more: int) -> None:
    """Spans that begin and end with one of a tile's four vectors, or one element beside."""
    settings, offset = (torch.float32, 1, "rademacher", "stochastic", 0.1), (8 + part) * WIDTH + more
    for n in (WIDTH, 2 * WIDTH - more):
        w = weights(n, torch.bfloat16)
        with force("kernel"):
            made = step(w.to(kernel_device), *settings, offset, fused=True)
        assert_same_bits(made, step(w, *settings, offset, fused=True))
