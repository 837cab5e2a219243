"""Packing loses nothing, and only models that keep packed samples apart get packed rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RecurrentGemmaForCausalLM,
)

from keyhole.data.dataset import Dataset
from keyhole.data.loader import collate
from keyhole.errors import UserError
from keyhole.model.best_fit import pack
from keyhole.model.packing import check_packing
from tests.model.decoders import config as decoder_config

SIZE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = SIZE | {"intermediate_size": 64, "num_key_value_heads": 2}
APART = [
    (LlamaForCausalLM, LlamaConfig(**MLP)),
    (MixtralForCausalLM, MixtralConfig(**MLP, num_local_experts=4, sliding_window=4)),
    (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
]
LEAKING = [
    (OPTForCausalLM, OPTConfig(**SIZE, ffn_dim=64, word_embed_proj_dim=32)),
    # a leak of less than 1 % of what other positions change
    (OPTForCausalLM, OPTConfig(**SIZE, ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False)),
    (RecurrentGemmaForCausalLM, decoder_config("recurrent_gemma")),
]


def build(cls: type, config: object, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(config).to(dtype)


@given(lengths=st.lists(st.integers(1, 50), max_size=60), spare=st.integers(0, 60))
def test_every_sample_is_in_exactly_one_row(lengths: list[int], spare: int) -> None:
    """No sample is lost, doubled or cut, no row is too long, and at most one row is half empty."""
    max_length = max(lengths, default=1) + spare
    rows = pack(lengths, max_length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < total <= max_length for total in sums)
    assert sum(total <= max_length / 2 for total in sums) <= 1
    assert pack(lengths, max_length) == rows


def test_each_sample_goes_into_the_fullest_row_where_it_fits() -> None:
    """Best fit: 3 goes beside 7, not beside 5."""
    assert pack([5, 7, 3], 10) == [[1, 2], [0]]


@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=12))
def test_packed_rows_hold_every_token_once(lengths: list[int]) -> None:
    """Positions begin at 0 in every sample, its first token is never a target, and all tokens are there."""
    ids = [torch.arange(100 * i, 100 * i + n).numpy() for i, n in enumerate(lengths)]
    trained = [torch.ones(n, dtype=torch.bool).numpy() for n in lengths]
    dataset = Dataset(ids, trained, rows=pack(lengths, 24))
    seen = [token for row in dataset for token in row.input_ids]
    assert sorted(seen) == sorted(int(t) for sample in ids for t in sample)
    for row in dataset:
        assert row.position_ids == [token % 100 for token in row.input_ids]
        assert [label == -100 for label in row.labels] == [p == 0 for p in row.position_ids]
        assert all(label in (-100, token) for label, token in zip(row.labels, row.input_ids, strict=True))


@pytest.mark.parametrize(("cls", "config"), APART)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_keep_samples_apart_are_accepted(cls: type, config: object, dtype: torch.dtype) -> None:
    """Rounding is not taken for a leak, also with experts, a sliding window and dropout in training mode."""
    module = build(cls, config, dtype).train()
    check_packing(module)
    assert module.training


@pytest.mark.parametrize(("cls", "config"), LEAKING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_leak_are_refused(cls: type, config: object, dtype: torch.dtype) -> None:
    """The error has the architecture and the setting to change."""
    with pytest.raises(UserError, match=f"packing is not supported by {cls.__name__}: .*packing=false"):
        check_packing(build(cls, config, dtype))


def test_a_model_that_is_given_a_cache_is_refused() -> None:
    """With a cache the packed mask is never made; a loss that forgets use_cache=False is found out."""

    class Caching:
        module = build(LlamaForCausalLM, LlamaConfig(**MLP)).eval()
        config = module.config

        @torch.no_grad()
        def nll(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            labels = batch["labels"][:, 1:]
            logits = self.module(batch["input_ids"], position_ids=batch.get("position_ids")).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            return loss.sum(1), (labels != -100).sum(1)

    with pytest.raises(UserError, match="packing is not supported by LlamaForCausalLM"):
        check_packing(Caching())


def test_attention_in_chunks_of_the_row_is_refused() -> None:
    """Llama 4 cuts attention at multiples of a chunk counted in the row, so longer rows would cut samples."""
    module = build(LlamaForCausalLM, LlamaConfig(**MLP, attention_chunk_size=16))
    check_packing(module, max_length=16)
    with pytest.raises(UserError, match="max_length=16 or less"):
        check_packing(module, max_length=32)


def test_a_packed_batch_costs_what_its_samples_cost() -> None:
    """The loss of packed rows, padding included, is the sum of the losses of the samples alone."""
    module = build(LlamaForCausalLM, LlamaConfig(**MLP)).eval()
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 5, 9, 3, 4]
    ids = [torch.randint(0, 64, (n,), generator=generator).numpy() for n in lengths]
    trained = [torch.ones(n, dtype=torch.bool).numpy() for n in lengths]
    alone, packed = Dataset(ids, trained), Dataset(ids, trained, rows=pack(lengths, 13))
    assert len(packed) < len(alone)
    assert nll(module, collate(list(packed), 0)) == pytest.approx(nll(module, collate(list(alone), 0)), rel=1e-5)


def nll(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    labels = batch.pop("labels")[:, 1:]
    with torch.no_grad():
        logits = module(**batch, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum").item()
