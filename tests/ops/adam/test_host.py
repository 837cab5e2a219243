"""AdamW on the host: torch's own bits, whatever the chunk, the dtypes and the memory that is reused."""

from typing import Any

import pytest
import torch

from keyhole.ops.adam.host import host_adamw_

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
    """Master and moments are torch.optim.AdamW(fused=True)'s to the bit; the weight is the master, rounded once."""
    grads = gradients(dtype)
    optimizer = by_torch(grads, fused=True)
    [param] = optimizer.param_groups[0]["params"]
    theirs = [param.data, *(optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq"))]
    for weight in (None, torch.empty(N, dtype=torch.bfloat16)):
        for mine, other in zip(ours(grads, weight, chunk), theirs, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("clip", [1.0, 0.37])
def test_equals_the_default_optimizer(clip: float) -> None:
    """Within 1e-6 of what torch does by default, clipped or not, after 20 steps."""
    grads = gradients()
    optimizer = by_torch(grads, clip)
    [param] = optimizer.param_groups[0]["params"]
    mine = ours(grads, clip=clip)
    for got, expected in zip(mine, (param.data, *list(optimizer.state[param].values())[1:]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7 * float(expected.abs().max()))


def test_threads_change_no_bit() -> None:
    """The kernel cuts its work at whole vectors, so two threads compute what one does."""
    before, grads = torch.get_num_threads(), gradients(torch.bfloat16)
    try:
        torch.set_num_threads(1)
        one = ours(grads, chunk=1024)
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(one, ours(grads, chunk=1024), strict=True))
    finally:
        torch.set_num_threads(before)


def test_the_master_keeps_steps_that_the_weight_cannot_show() -> None:
    """Steps far below the spacing of bfloat16 add up in the master and reach the weight in the end."""
    state, weight = [torch.ones(64), torch.zeros(64), torch.zeros(64)], torch.ones(64, dtype=torch.bfloat16)
    for t in range(100):
        host_adamw_(*state, torch.ones(64, dtype=torch.bfloat16), weight, step=t + 1, lr=1e-4)
        if t == 0:
            assert weight.eq(1).all() and state[0].lt(1).all()
    assert weight.lt(1).all() and weight.float().sub(0.99).abs().max() < 0.004
