"""AdamW on the device: the bits of the host's kernel, whoever made them, and in which order."""

import pytest
import torch

from keyhole.ops import backend
from keyhole.ops.adam.device import SQUARES, adamw_, squares_of_host
from keyhole.ops.adam.host import host_adamw_
from tests.ops.adam.test_host import HOW, N, gradients, start

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@pytest.mark.parametrize("clip", [1.0, 0.37])
@pytest.mark.parametrize("beta1", [0.8, 0.9, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_equals_the_hosts_kernel_to_the_bit(device: str, dtype: torch.dtype, beta1: float, clip: float) -> None:
    """20 steps of gradients of all sizes, weights rounded into the gradient's memory; kernel or reference."""
    squares = squares_of_host(torch.device(device))
    assert squares in SQUARES
    how = HOW | {"beta1": beta1, "clip": clip, "squares": squares}
    host = [start(), torch.zeros(N), torch.zeros(N)]
    mine = [flat.to(device, copy=True) for flat in host]
    for t, grad in enumerate(gradients(dtype)):
        here, there = grad.clone(), grad.to(device, copy=True)
        host_adamw_(*host, here, here, step=t + 1, **{k: v for k, v in how.items() if k != "squares"})
        adamw_(*mine, there, there, step=t + 1, **how)
        assert all(torch.equal(a, b.cpu()) for a, b in zip([*host, here], [*mine, there], strict=True)), t
    assert not torch.equal(host[0], start())


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_smallest_numbers_are_not_flushed(device: str) -> None:
    """Moments of rows that were not seen for long get below 1e-38, and with a tiny eps they still move a weight."""
    squares = squares_of_host(torch.device(device))
    drawn = torch.randn(4, N, generator=torch.Generator().manual_seed(3)).abs() + 0.1
    host = [flat * scale for flat, scale in zip(drawn, (0.0, 1e-39, 1e-40, 1e-39), strict=True)]
    mine = [flat.to(device, copy=True) for flat in host]
    how = {"step": 7, "lr": 1e-3, "eps": 1e-42}
    host_adamw_(*host, None, **how)
    adamw_(*mine, torch.empty_like(mine[0]), squares=squares, **how)
    assert host[0].isfinite().all() and host[0].count_nonzero() == N and host[2].count_nonzero() == N
    assert all(torch.equal(a, b.cpu()) for a, b in zip(host[:3], mine, strict=False))


@pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("squares", SQUARES)
@pytest.mark.parametrize("clip", [1.0, 0.37])
def test_the_kernel_is_the_reference(squares: str, clip: float) -> None:
    """Every way of summing squares; a length that is no multiple of the block."""
    results = []
    for choice in ("kernel", "reference"):
        state, weight = [start(), torch.zeros(N), torch.zeros(N)], torch.empty(N, dtype=torch.bfloat16)
        with backend.force(choice):
            for t, grad in enumerate(gradients(torch.bfloat16)[:3]):
                adamw_(*state, grad, weight, squares=squares, step=t + 1, clip=clip, **HOW)
        results.append([*state, weight])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_build_of_torch_that_rounds_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None: nobody may then mix the two."""

    def other(*state: torch.Tensor, **how: float) -> None:
        host_adamw_(*state, **how)
        state[0].add_(torch.finfo(torch.float32).eps * state[0].abs())

    monkeypatch.setattr("keyhole.ops.adam.device.host_adamw_", other)
    assert squares_of_host(torch.device("cpu")) is None
