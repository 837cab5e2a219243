"""Attention's backward pass gives the same bits every time, and leaves nothing set."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig

import keyhole
from keyhole.model.backward import attention as module
from keyhole.model.backward.attention import attention, exact_attention


def settings() -> tuple[Any, ...]:
    """Everything that is set for a while."""
    return (
        F.scaled_dot_product_attention,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def test_algorithms_are_deterministic_in_the_nodes_of_attention_alone() -> None:
    """Also if the output is a part of what the node returned; and of operations before and after it none is."""
    seen = {}

    def note(name: str) -> Any:
        def hook(*grads: Any) -> None:
            seen[name] = torch.are_deterministic_algorithms_enabled()

        return hook

    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    scaled = q * 2
    output = attention(scaled, k, v, is_causal=True)
    (node,) = module._attention_nodes((output[..., :8] * 3).grad_fn)
    assert "ScaledDotProduct" in node.name()
    beyond = attention(scaled, k, v, is_causal=True)
    for places in range(module.DEPTH):  # the search ends: a graph is large
        assert places == 0 or len(module._attention_nodes(beyond.grad_fn)) == 1
        beyond = beyond * 2
    assert module._attention_nodes(beyond.grad_fn) == []
    node.register_prehook(note("inside"))
    scaled.grad_fn.register_prehook(note("after"))
    output.register_hook(note("before"))
    output.sum().backward()
    assert seen == {"before": False, "inside": True, "after": False}
    expected = F.scaled_dot_product_attention(scaled, k, v, is_causal=True)
    assert torch.equal(output, expected)


def test_on_a_cpu_and_within_one_tile_nothing_changes() -> None:
    before = settings()
    for device, longest in (("cpu", 4096), ("cuda", module.TILE)):
        with exact_attention(torch.device(device), longest):
            assert settings() == before


def test_contexts_within_each_other_and_errors_leave_everything_as_it_was() -> None:
    """On a CPU these are settings only. The inner context leaves the outer one in force."""
    before, cuda = settings(), torch.device("cuda")
    with pytest.raises(ZeroDivisionError), exact_attention(cuda, 1024):
        with exact_attention(cuda, 1024):
            pass
        assert F.scaled_dot_product_attention is attention and not torch.backends.cuda.cudnn_sdp_enabled()
        module._set()  # an error within an attention node
        raise ZeroDivisionError
    assert settings() == before


def test_an_attention_of_the_users_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what only it knows; and afterwards it is set again."""
    calls = []

    def own(q: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        calls.append(more)
        return q * 2

    monkeypatch.setattr(F, "scaled_dot_product_attention", own)
    q = torch.ones(1, 1, 2, 8)
    with exact_attention(torch.device("cuda"), 1024):
        F.scaled_dot_product_attention(q, q, q, None, 0.0, True, enable_gqa=True, temperature=3)
    assert F.scaled_dot_product_attention is own
    (more,) = calls
    assert more["is_causal"] and more["enable_gqa"] and more["temperature"] == 3


def test_cudnn_stays_where_it_is_the_only_one() -> None:
    before = settings()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        with exact_attention(torch.device("cuda"), 1024):
            assert torch.backends.cuda.cudnn_sdp_enabled()
    assert settings() == before


def wide_llama() -> LlamaConfig:
    """Heads as wide as those of large models."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=512, max_position_embeddings=2048)


def trained(method: str, device: str = "cuda", padded: bool = False, **how: Any) -> list[torch.Tensor]:
    """Weights after three steps on rows of 1,024 tokens."""
    where = {name: how.pop(name) for name in ("placement",) if name in how}
    model = keyhole.load(wide_llama(), init="random", device=device, dtype="bfloat16", seed=1, **where)
    made = getattr(keyhole, method)(model, 1e-2, **how)
    for step in range(3):
        ids = torch.randint(3, 500, (2, 1024), generator=torch.Generator().manual_seed(step))
        mask = torch.ones_like(ids)
        if padded:
            mask[1, 900:] = 0
        made.step({"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)})
    made.flush()
    return [model.home(tensor).cpu().clone() for tensor in model.layout.tensors]


CASES: dict[str, dict[str, Any]] = {
    "lomo": {"method": "LOMO"},
    "padded": {"method": "LOMO", "padded": True},
    "kept": {"method": "LOMO", "activations": "auto"},
    "compiled": {"method": "LOMO", "compile": True},
    "adam-offload": {"method": "AdamOffload"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_long_rows_give_the_same_bits_every_time(name: str) -> None:
    """Two runs are equal, and streamed equals resident."""
    before = settings()
    first = trained(**CASES[name])
    assert all(map(torch.equal, first, trained(**CASES[name])))
    assert all(map(torch.equal, first, trained(**CASES[name], placement="stream")))
    assert settings() == before
