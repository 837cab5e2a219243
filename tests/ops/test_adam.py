"""AdamW on the host: torch's own bits, whatever the chunk and the dtypes; on the device: the bits of the host."""

from typing import Any

import pytest
import torch

from keyhole.ops import backend
from keyhole.ops.adam import SQUARES, adamw_, host_adamw_, squares_of_host

N, STEPS = 4096 + 64, 20
HOW = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-7, "weight_decay": 0.1}


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of very different sizes, some exactly 0."""
    generator = torch.Generator().manual_seed(1)
    size_N = 10.0 ** torch.empty(N).uniform_(-6, 0, generator=generator)
    size_N[::7] = 0
    return [(torch.randn(N, generator=generator) * size_N).to(dtype) for _ in range(STEPS)]


def start() -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


def by_torch(grads: list[torch.Tensor], clip: float = 1.0, **options: Any) -> torch.optim.AdamW:
    param = torch.nn.Parameter(start())
    betas = (HOW["beta1"], HOW["beta2"])
    rest = {key: HOW[key] for key in ("lr", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW([param], betas=betas, **rest, **options)
    for grad in grads:
        param.grad = grad.float() * clip
        optimizer.step()
    return optimizer


def ours(grads: list[torch.Tensor], weight: torch.Tensor | None = None, chunk: int = N, clip: float = 1.0) -> list:
    """[master, exp_avg, exp_avg_sq] after all steps; weight=None puts the weight in the gradient's memory."""
    state = [start(), torch.zeros(N), torch.zeros(N)]
    for t, grad in enumerate(grads):
        grad = grad.clone()
        out = grad if weight is None else weight
        host_adamw_(*state, grad, out, step=t + 1, **HOW, clip=clip, scratch=torch.empty(chunk))
        assert torch.equal(out, state[0].to(out.dtype))
    return state


@pytest.mark.parametrize("chunk", [64, 1024, N])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_the_fused_optimizer(dtype: torch.dtype, chunk: int) -> None:
    grads = gradients(dtype)
    optimizer = by_torch(grads, fused=True)
    [param] = optimizer.param_groups[0]["params"]
    theirs = [param.data, *(optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq"))]
    for weight in (None, torch.empty(N, dtype=torch.bfloat16)):
        for mine, other in zip(ours(grads, weight, chunk), theirs, strict=True):
            assert torch.equal(mine, other)


def test_threads_change_no_bit() -> None:
    before, grads = torch.get_num_threads(), gradients(torch.bfloat16)
    try:
        torch.set_num_threads(1)
        one = ours(grads, chunk=1024)
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(one, ours(grads, chunk=1024), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [1.0, 0.37])
@pytest.mark.parametrize("beta1", [0.8, 0.9, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_device_has_the_hosts_bits(cuda: torch.device, dtype: torch.dtype, beta1: float, clip: float) -> None:
    squares = squares_of_host(cuda, {})
    assert squares in SQUARES
    how = HOW | {"beta1": beta1, "clip": clip}
    host = [start(), torch.zeros(N), torch.zeros(N)]
    mine = [flat.to(cuda, copy=True) for flat in host]
    for t, grad in enumerate(gradients(dtype)):
        here, there = grad.clone(), grad.to(cuda, copy=True)
        host_adamw_(*host, here, here, step=t + 1, **how)
        adamw_(*mine, there, there, step=t + 1, squares=squares, **how)
        assert all(torch.equal(a, b.cpu()) for a, b in zip([*host, here], [*mine, there], strict=True)), t
    assert not torch.equal(host[0], start())


@pytest.mark.gpu
def test_the_smallest_numbers_are_not_flushed(cuda: torch.device) -> None:
    """Moments of rows that were not seen for long get below 1e-38, and with a tiny eps they still move a weight."""
    squares = squares_of_host(cuda, {})
    drawn = torch.randn(4, N, generator=torch.Generator().manual_seed(3)).abs() + 0.1
    host = [flat * scale for flat, scale in zip(drawn, (0.0, 1e-39, 1e-40, 1e-39), strict=True)]
    mine = [flat.to(cuda, copy=True) for flat in host]
    how = {"step": 7, "lr": 1e-3, "eps": 1e-42}
    host_adamw_(*host, None, **how)
    adamw_(*mine, torch.empty_like(mine[0]), squares=squares or "", **how)
    assert host[0].isfinite().all() and host[0].count_nonzero() == N and host[2].count_nonzero() == N
    assert all(torch.equal(a, b.cpu()) for a, b in zip(host[:3], mine, strict=False))


@pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("squares", SQUARES)
@pytest.mark.parametrize("beta1, clip", [(0.8, 1.0), (0.4, 0.37)])
def test_the_kernel_computes_what_the_host_does(squares: str, beta1: float, clip: float) -> None:
    """Every way of summing squares, a length that is no multiple of the block; the interpreter's fma rounds twice."""
    host, mine = ([start(), torch.zeros(N), torch.zeros(N), torch.empty(N)] for _ in range(2))
    for t, grad in enumerate(gradients(torch.bfloat16)[:3]):
        how = HOW | {"beta1": beta1, "clip": clip, "step": t + 1}
        host_adamw_(*host[:3], grad.float(), host[3], **how)
        adamw_(*mine[:3], grad.float(), mine[3], squares=squares, **how)
    for a, b in zip(host, mine, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6 * float(a.abs().max()))


@pytest.mark.gpu
def test_a_build_of_torch_that_rounds_otherwise_is_noticed(cuda: torch.device) -> None:
    """None: nobody may then mix the two."""

    def other(*state: Any, **how: Any) -> None:
        host_adamw_(*state, **how)
        state[0].add_(torch.finfo(torch.float32).eps * state[0].abs())

    assert squares_of_host(cuda, {}, other) is None
