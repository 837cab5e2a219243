"""Packing loses nothing, and only models that keep packed samples apart get packed rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyhole
from keyhole.data.batches import Padding, make_batch
from keyhole.data.dataset import Dataset
from keyhole.errors import UserError
from keyhole.model.rows import pack
from tests.families.tiny import tiny_config
from tests.matrix import in_every_run
from tests.model.decoders import DECODERS
from tests.model.decoders import config as decoder_config

APART = ("llama", "mixtral", "gpt2", "qwen3_moe")
LEAKING = ("opt", "opt_projected", "recurrent_gemma", "falcon_h1", "lfm2_moe")  # the latter four: weakly
CHUNK = 16


def build(name: str, dtype: str = "float32", **changes: object) -> keyhole.Model:
    found = decoder_config(name, **changes) if name in DECODERS else tiny_config(name, **changes)
    return keyhole.load(found, init="random", device="cpu", dtype=dtype)


@given(lengths=st.lists(st.integers(1, 50), max_size=60), spare=st.integers(0, 60))
def test_every_sample_is_in_exactly_one_row(lengths: list[int], spare: int) -> None:
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
    ids = [torch.arange(100 * i, 100 * i + n).numpy() for i, n in enumerate(lengths)]
    trained = [torch.ones(n, dtype=torch.bool).numpy() for n in lengths]
    dataset = Dataset(ids, trained, rows=pack(lengths, 24))
    seen = [token for row in dataset for token in row.input_ids]
    assert sorted(seen) == sorted(int(t) for sample in ids for t in sample)
    for row in dataset:
        assert row.position_ids == [token % 100 for token in row.input_ids]
        assert [label == -100 for label in row.labels] == [p == 0 for p in row.position_ids]
        assert all(label in (-100, token) for label, token in zip(row.labels, row.input_ids, strict=True))


@in_every_run(lambda name, dtype: (dtype == "bfloat16") == (name in ("llama", "mixtral")))
@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_that_keep_samples_apart_are_accepted(name: str, dtype: str) -> None:
    """Rounding is not taken for a leak, also with experts."""
    model = build(name, dtype)
    model.row_rules.check_packing()
    assert model.row_rules.keeps_apart()


@in_every_run(lambda name, dtype: (dtype == "bfloat16") == (name in ("opt", "falcon_h1")))
@pytest.mark.parametrize("name", LEAKING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_that_leak_are_refused(name: str, dtype: str) -> None:
    model = build(name, dtype)
    cls = type(model.module).__name__
    with pytest.raises(UserError, match=f"packing is not supported by {cls}: .*packing=false"):
        model.row_rules.check_packing()
    assert not model.row_rules.keeps_apart()


@pytest.mark.parametrize("share", [0.03, 0.003])
def test_a_weak_leak_is_found_in_16_bits(share: float) -> None:
    """A small part of each position is added to the next, across samples."""
    model = build("llama", "bfloat16")
    first = model.module.model.layers[0]
    first.register_forward_hook(lambda module, args, x: x + share * x.roll(1, dims=1))
    with pytest.raises(UserError, match="packed samples see each other"):
        model.row_rules.check_packing()


def test_rounding_by_the_size_of_a_group_is_no_leak() -> None:
    """Products with experts round by the number of their tokens, which both sides of the comparison have."""
    model = build("mixtral", "bfloat16")
    first = model.module.model.layers[0].mlp

    def rounds(module: torch.nn.Module, args: tuple, x_BTH: torch.Tensor) -> torch.Tensor:
        groups = torch.unique(module.gate(args[0].flatten(0, 1))[-1], return_counts=True)[1]
        return x_BTH * (1 + 0.01 * float(groups.double().std()))

    first.register_forward_hook(rounds)
    model.row_rules.check_packing()


def test_a_model_that_is_given_a_cache_is_refused() -> None:
    model = build("llama")
    caches = lambda module, args, kwargs: (args, kwargs | {"use_cache": True})  # noqa: E731
    model.module.model.register_forward_pre_hook(caches, with_kwargs=True)
    with pytest.raises(UserError, match="packing is not supported by LlamaForCausalLM"):
        model.row_rules.check_packing()


def test_attention_in_chunks_of_the_row_is_refused() -> None:
    """Llama 4 cuts attention at multiples of a chunk counted in the row, so longer rows would cut samples."""
    model = build("llama", attention_chunk_size=CHUNK)
    model.row_rules.check_packing(CHUNK)
    with pytest.raises(UserError, match="max_length=16 or less"):
        model.row_rules.check_packing(2 * CHUNK)


def test_a_packed_batch_costs_what_its_samples_cost() -> None:
    module = build("llama").module
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 5, 9, 3, 4]
    ids = [torch.randint(0, 64, (n,), generator=generator).numpy() for n in lengths]
    trained = [torch.ones(n, dtype=torch.bool).numpy() for n in lengths]
    alone, packed = Dataset(ids, trained), Dataset(ids, trained, rows=pack(lengths, 13))
    assert len(packed) < len(alone)
    losses = [nll(module, make_batch(data, range(len(data)), Padding())) for data in (packed, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def nll(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    labels = batch.pop("labels")[:, 1:]
    with torch.no_grad():
        logits = module(**batch, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum").item()
