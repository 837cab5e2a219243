"""What a block does per token is counted from its own code, without weights and for any family."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from keyhole.bench.shapes import llama_config
from keyhole.model.structure.block_counts import BlockCounts, _Counter
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from tests.model.decoders import config

BF16, FP32 = torch.bfloat16, torch.float32
TINY = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "vocab_size": 16}


def counts(made: object, dtype: torch.dtype = BF16) -> BlockCounts:
    found = find_layout(build(made, dtype)).counts
    assert found is not None
    return found


def test_a_llama_block_by_hand() -> None:
    """Saved of the width H: two norms in float32 (2 each), their results before the weight, inputs of the products
    after norms and attention, queries, keys, values, and of the width W gate, its activation, up and the product."""
    found, (hidden, wide) = counts(llama_config("7B")), (4096, 11008)
    by_hand = (2 * 2 + 2 + 2 + 3 + 1) * hidden + 4 * wide
    assert found.saved == pytest.approx(by_hand, rel=0.01)
    assert found.saved - found.saved_frozen == 2 * hidden  # the results of norms before their trained weight
    assert found.forward_kernels == 37


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2"])
def test_saved_is_what_autograd_saves_of_a_real_block(kind: str) -> None:
    """The same numbers as hooks find when a model with weights is run; attention's own tensors aside."""
    made = config(kind)
    found, torch_found = counts(made, torch.float32), [0, 0]
    module = AutoModelForCausalLM.from_config(made).eval()
    block, tokens = find_blocks(module)[1], 64
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights and x.is_floating_point():
            seen[x.untyped_storage().data_ptr()] = x
        return x

    def run(*args: object, **kwargs: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), _Counter() as counter:
            output = usual(*args, **kwargs)
        torch_found[:] = [sum(x.untyped_storage().nbytes() for x in seen.values()) // 4, counter.kernels]
        return output

    usual, block.forward = block.forward, run
    module(input_ids=torch.arange(tokens)[None] % 64, use_cache=False)
    width = module.get_input_embeddings().weight.shape[1]
    assert found.saved == pytest.approx(torch_found[0] / tokens, abs=2.5 * width)
    assert abs(found.forward_kernels - torch_found[1]) <= 4


def test_a_block_that_reads_values_has_no_counts() -> None:
    """Its formulas are those of a Llama block."""
    module = build(config("llama"), BF16)

    class Reads(type(find_blocks(module)[1])):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return super().forward(hidden, **kwargs) if float(hidden.sum()) < 1e9 else hidden

    for block in find_blocks(module):
        block.__class__ = Reads
    assert find_layout(module).counts is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_gets_the_same_counts(context: Callable[[], Any]) -> None:
    """A model may be loaded, and a machine measured, within either; what is found then is kept."""
    made = LlamaConfig(**TINY, num_hidden_layers=2)
    with context():
        found = counts(made, FP32)
    assert found == counts(made, FP32)


def test_counting_changes_nothing() -> None:
    """Neither the module nor PyTorch's attention; and a layout counts once."""
    module, attention = build(config("llama"), BF16), nn.functional.scaled_dot_product_attention
    before = {name: id(p) for name, p in module.named_parameters()}
    layout = find_layout(module)
    assert layout.counts is find_layout(module, 1000).counts
    assert {name: id(p) for name, p in module.named_parameters()} == before
    assert nn.functional.scaled_dot_product_attention is attention
    assert not any(block._forward_pre_hooks for block in find_blocks(module))
