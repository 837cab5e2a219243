"""Which norm a module computes: found for those of Transformers, and for nothing that only looks like one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from keyhole.model.forward.norms import Known, find_norm
from keyhole.ops.lowrank.norm import Norm

CPU, WIDTH = torch.device("cpu"), 24


def found(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Known | None:
    return find_norm(module, {name: p.shape for name, p in module.named_parameters()}, CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "make, kind, eps",
    [
        (nn.LayerNorm, Norm(True), "eps"),
        (lambda width: nn.LayerNorm(width, bias=False), Norm(True), "eps"),
        (CohereLayerNorm, Norm(True), "variance_epsilon"),
        (LlamaRMSNorm, Norm(False, early=True), "variance_epsilon"),
        (Qwen3RMSNorm, Norm(False, early=True), "variance_epsilon"),
        (Olmo2RMSNorm, Norm(False), "variance_epsilon"),
        (GemmaRMSNorm, Norm(False, plus_one=True), "eps"),
    ],
)
def test_norms_of_transformers(make: Callable[[int], nn.Module], kind: Norm, eps: str, dtype: torch.dtype) -> None:
    """In float32 it makes no difference whether numbers are rounded before the weight."""
    known = found(make(WIDTH).to(dtype), dtype)
    assert known.eps == eps and (known.kind.centred, known.kind.plus_one) == (kind.centred, kind.plus_one)
    assert dtype == torch.float32 or known.kind == kind


class Scaled(LlamaRMSNorm):
    """A little more than the formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.1 * super().forward(x)


class Grouped(nn.Module):
    """The mean of each half of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.unflatten(-1, (2, -1))
        return self.weight * (halves * torch.rsqrt(halves.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)


class OverTokens(Grouped):
    """The mean over another dimension, where there is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        over = -1 if x.dim() == 2 else -2
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(over, keepdim=True) + self.eps))


class OtherEps(Grouped):
    """A number that no attribute holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 10 * self.eps))


class Gated(LlamaRMSNorm):
    """Cannot run on rows alone."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * gate


def with_(module: nn.Module, **changes: Any) -> nn.Module:
    for name, value in changes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    "module",
    [
        Scaled(WIDTH),
        Grouped(),
        OverTokens(),
        OtherEps(),
        Gated(WIDTH),
        nn.LayerNorm((2, WIDTH)),
        nn.Linear(WIDTH, WIDTH),
        nn.Embedding(9, WIDTH),
        nn.BatchNorm1d(WIDTH),
        with_(LlamaRMSNorm(WIDTH), other=nn.Parameter(torch.ones(WIDTH))),
        with_(LlamaRMSNorm(WIDTH), inner=nn.Identity()),
        with_(nn.LayerNorm(WIDTH), forward=torch.sin),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_are_left_alone(module: nn.Module) -> None:
    assert found(module, torch.float32) is None


def test_the_module_is_not_touched() -> None:
    """Empty parameters, as between passes of a streamed model; a forward hook is not called, no random number drawn."""
    module, calls = LlamaRMSNorm(WIDTH), []
    module.register_forward_hook(lambda *args: calls.append(args))
    parameter, module.weight.data = module.weight, torch.empty(0)
    state = torch.get_rng_state()
    assert find_norm(module, {"weight": torch.Size([WIDTH])}, CPU, torch.float32) is not None
    assert module.weight is parameter and module.weight.numel() == 0 and not calls
    assert torch.equal(torch.get_rng_state(), state)
