"""Adam's step in the place of its gradient, against torch's AdamW on a parameter of zeros."""

import pytest
import torch

from keyhole.methods.lsp.adam import adam_delta_

RULE = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def device_of(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device(name)


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_what_adamw_leaves_in_zeros(device: str) -> None:
    """To the bit, moments too, over sizes that fill no vector and several tensors in a call."""
    where, sizes = device_of(device), (1, 7, 64, 5003)
    m, v, m_torch, v_torch = ([torch.zeros(n, device=where) for n in sizes] for _ in range(4))
    how = {"lr": 1.0, "weight_decay": 0.0, "amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
    for t in range(1, 6):
        grads = [torch.randn(n, device=where) * 10 ** (8 * torch.rand(n, device=where) - 6) for n in sizes]
        zeros, steps = [torch.zeros_like(g) for g in grads], [torch.tensor(float(t), device=where) for _ in sizes]
        torch._fused_adamw_(zeros, [g.clone() for g in grads], m_torch, v_torch, [], steps, **how, **RULE)
        adam_delta_(grads, m, v, steps, RULE)
        for found, expected in zip([*grads, *m, *v], [*zeros, *m_torch, *v_torch], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_is_a_factor_of_the_gradient(device: str) -> None:
    """The step and the moments of the smaller gradient, up to one rounding."""
    where = device_of(device)
    grad, clip, step = torch.randn(1000, device=where), torch.tensor(0.3, device=where), [torch.ones((), device=where)]
    found, expected = (
        [grad.clone(), *torch.zeros(2, 1000, device=where)],
        [grad * 0.3, *torch.zeros(2, 1000, device=where)],
    )
    adam_delta_(*([x] for x in found), step, RULE, clip=clip)
    adam_delta_(*([x] for x in expected), step, RULE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_a_skipped_step_leaves_the_moments(device: str) -> None:
    """Though the gradient is not finite."""
    where = device_of(device)
    grad, m, v = torch.full((100,), float("nan"), device=where), *torch.ones(2, 100, device=where)
    adam_delta_([grad], [m], [v], [torch.ones((), device=where)], RULE, skip=torch.ones((), device=where))
    assert torch.equal(m, torch.ones_like(m)) and torch.equal(v, torch.ones_like(v))
