"""Norms on a CPU that lose nothing to the length of a tensor; and the methods that clip by them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import keyhole
from keyhole import ops
from tests.methods.lomo.loops import micro_batches
from tests.model.decoders import config


@pytest.mark.parametrize("numel", [0, 1, 2**14, 2**14 + 1, 2**22 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_that_of_double_precision(numel: int, dtype: torch.dtype) -> None:
    """A large element and many small ones, whose squares are lost in a sum that goes from one to the next."""
    x = torch.full((numel,), 0.01, dtype=dtype)
    x[:1] = 64.0
    for found in (ops.norm(x), ops.norm(x.view(1, -1).t(), out=torch.zeros(())), ops.norms([x])[0]):
        assert float(found) == pytest.approx(float(x.double().norm()), rel=3e-5) and found.dtype == torch.float32


METHODS: list[Callable[[keyhole.Model], Any]] = [
    lambda model: keyhole.AdamOffload(model, lr=0.0, max_grad_norm=1.0),
    lambda model: keyhole.LSP(model, lr=0.0, d=16, max_grad_norm=1.0),
    lambda model: keyhole.APOLLOMini(model, lr=0.0, max_grad_norm=1.0),
    lambda model: keyhole.LOMO(model, lr=0.0, max_grad_norm=1.0),
]


@pytest.mark.parametrize("make", METHODS)
def test_methods_clip_by_it(make: Callable[[keyhole.Model], Any]) -> None:
    """A head whose gradient is the same everywhere, in chunks of 2^20 elements."""
    method = make(keyhole.load(config("llama", vocab_size=8192, hidden_size=128), init="random", device="cpu"))
    module = method.model.module
    for tensor in method.model.layout.tensors:
        tensor.param.requires_grad_(tensor.name == "lm_head.weight")
    method.backward(module(**micro_batches(0, 1)[0]).loss * 0 + 0.01 * module.lm_head.weight.sum())
    assert float(method.metrics()["grad_norm"]) == pytest.approx(0.01 * 2**10, rel=3e-5)
