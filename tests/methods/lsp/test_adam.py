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
