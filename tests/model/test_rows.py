"""Rows that are shared or joined have the losses of separate rows, and only models that allow it do so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyhole
from keyhole.errors import UserError
from keyhole.methods.zo.method import ZO
from keyhole.model.batch import to_device
from keyhole.model.forward.evaluation import nll_by_row
from keyhole.model.rows import WIDTHS, _rounded, find_shared
from tests.families.tiny import tiny_config
from tests.matrix import in_every_run
from tests.model.candidates import candidate_batch, of_one_token, plain_candidates_loss, ragged
from tests.model.decoders import VOCAB, batch, config, load
from tests.model.streaming import assert_trained_alike, streamed

CPU = torch.device("cpu")
ROWS = ("input_ids", "labels", "attention_mask")


def assert_plain_loss(model: keyhole.Model, one: dict[str, torch.Tensor]) -> None:
    """The loss of a step of zo is that of plain torch on all rows."""
    with torch.no_grad():
        expected = float(plain_candidates_loss(model.module, [one]))
    assert float(ZO(model, lr=0.0, eps=1e-6, seed=3).step(one)) == pytest.approx(expected, abs=1e-5)


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.integers(0, 10**6), st.booleans())
def test_targets_of_shared_rows_see_the_same_tokens(sizes: list[int], seed: int, one_token: bool) -> None:
    batch = of_one_token(sizes, seed) if one_token else candidate_batch(sizes, seed)
    apart, shared = to_device(batch, CPU), to_device(batch, CPU, shares=True)
    assert torch.equal(apart.target_N, shared.target_N) and torch.equal(apart.loss.row_N, shared.loss.row_N)
    assert (apart.loss.row_count, apart.token_count) == (shared.loss.row_count, shared.token_count)
    width = batch["input_ids"].shape[1]
    assert torch.equal(apart.index_N % width, shared.index_N % width)
    for own, other in zip(apart.index_N.tolist(), shared.index_N.tolist(), strict=True):
        (row, end), (place, _) = divmod(own, width), divmod(other, width)
        assert torch.equal(apart.inputs["input_ids"][row, : end + 1], shared.inputs["input_ids"][place, : end + 1])
    if one_token:
        assert len(shared.inputs["input_ids"]) == len(sizes)


def test_equal_questions_stay_apart() -> None:
    """So that the number of rows is the same in every batch; without questions, all equal rows share."""
    batch = of_one_token([2, 2])
    for name in ROWS:
        batch[name][2:] = batch[name][:2]
    assert len(to_device(batch, CPU, shares=True).inputs["input_ids"]) == 2
    rows = {name: batch[name] for name in ROWS}
    assert len(to_device(rows, CPU, shares=True).inputs["input_ids"]) == 1
    assert len(to_device(rows, CPU).inputs["input_ids"]) == 4


@pytest.mark.parametrize("elsewhere", ROWS)
def test_a_batch_that_is_partly_on_a_device_is_not_looked_at(elsewhere: str) -> None:
    batch = of_one_token([2, 2])
    assert find_shared(batch) is not None
    assert find_shared(batch | {elsewhere: batch[elsewhere].to("meta")}) is None


@pytest.mark.parametrize("name", ["llama", "opt", "gemma2"])
def test_losses_of_shared_rows_are_those_of_separate_rows(name: str) -> None:
    model = load(name)
    batch = of_one_token([2, 3, 2])
    own = torch.tensor(
        [float(model.nll({k: x[i : i + 1] for k, x in batch.items() if k in ROWS})[0]) for i in range(7)]
    )
    torch.testing.assert_close(model.nll(batch)[0].float(), own, rtol=1e-5, atol=1e-5)
    assert_plain_loss(model, batch)


@given(st.integers(12, 60), st.integers(0, 10**6), st.integers(9, 300), st.integers(1, 3), st.booleans())
def test_targets_of_joined_rows_see_the_same_tokens(
    questions: int, seed: int, longest: int, tokens: int, shares: bool
) -> None:
    batch = ragged(questions, seed, longest, tokens)
    apart, joined = to_device(batch, CPU), to_device(batch, CPU, shares=shares, most=512)
    assert torch.equal(apart.target_N, joined.target_N) and torch.equal(apart.loss.row_N, joined.loss.row_N)
    assert (apart.loss.row_count, apart.token_count) == (joined.loss.row_count, joined.token_count)
    ids_RW, flat = joined.inputs["input_ids"], joined.inputs["input_ids"].flatten()
    if not joined.packed:
        assert ids_RW.shape[1] == batch["input_ids"].shape[1]
        return
    positions = joined.inputs["position_ids"].flatten()
    width = batch["input_ids"].shape[1]
    assert "attention_mask" not in joined.inputs and int(positions.max()) < width
    assert ids_RW.numel() <= 0.75 * batch["input_ids"].numel()
    starts = set((positions == 0).nonzero()[:, 0].tolist())
    for own, other in zip(apart.index_N.tolist(), joined.index_N.tolist(), strict=True):
        row, end = divmod(own, width)
        begin = other - end
        assert torch.equal(batch["input_ids"][row, : end + 1], flat[begin : other + 1])
        assert torch.equal(positions[begin : other + 1], torch.arange(end + 1))
        assert begin in starts and begin // ids_RW.shape[1] == other // ids_RW.shape[1]


@given(st.integers(0, 10**6), st.integers(30, 100))
def test_batches_of_one_size_have_few_shapes(seed: int, questions: int) -> None:
    """Rows are of three widths, and their number one of four per doubling, at most a third above what is needed."""
    joined = to_device(ragged(questions, seed), CPU, shares=True, most=512).inputs["input_ids"]
    assert joined.shape[1] in WIDTHS and joined.shape[0] == _rounded(joined.shape[0])
    for count in range(1, 100):
        assert count <= _rounded(count) <= max(count, 4 / 3 * count)
    assert len({_rounded(count) for count in range(33, 65)}) == 4


def test_what_is_not_joined() -> None:
    batch = ragged()
    assert to_device(batch, CPU, shares=True, most=64).packed
    full = of_one_token([2] * 20)
    assert not to_device(full, CPU, shares=True, most=64).packed
    assert not to_device(batch, CPU, shares=True, most=63).packed
    assert not to_device(batch, CPU, shares=True).packed
    left = {name: x.flip(1) if x.dim() == 2 else x for name, x in batch.items()}
    assert not to_device(left, CPU, shares=True, most=64).packed
    at = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    assert not to_device(batch | {"position_ids": at}, CPU, shares=True, most=64).packed


@in_every_run(lambda name, tokens: tokens == 1 or name in ("llama", "opt"))
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "opt"])
def test_losses_of_joined_rows_are_those_of_separate_rows(name: str, tokens: int) -> None:
    """Of a step of zo against plain torch on all rows; OPT would mix rows, and keeps them apart."""
    model = load(name)
    batch = ragged(tokens=tokens)
    (sent,) = model.send([batch], shares=True, joins=True)
    assert sent.packed == (name != "opt")
    assert_plain_loss(model, batch)


def test_a_mask_that_hides_needed_tokens_is_obeyed() -> None:
    """Labels reach beyond the end of the mask: hidden tokens stay hidden, at a loss that shows it."""
    model = keyhole.load(config("llama", initializer_range=0.2), init="random", device="cpu")
    batch = ragged(tokens=3)
    mask = batch["attention_mask"]
    mask[torch.arange(mask.shape[1]) >= mask.sum(dim=1, keepdim=True) - 3] = 0
    assert_plain_loss(model, batch)


def test_positions_that_do_not_begin_at_0() -> None:

    def from_7(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple:
        if kwargs.get("position_ids") is None:
            ids_BT = args[0] if args else kwargs["input_ids"]
            kwargs["position_ids"] = 7 + torch.arange(ids_BT.shape[1])[None]
        return args, kwargs

    model = keyhole.load(config("gpt2", n_positions=128), init="random", device="cpu")
    model.module.transformer.register_forward_pre_hook(from_7, with_kwargs=True)
    (sent,) = model.send([ragged()], shares=True, joins=True)
    assert not sent.packed


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_padding_that_changes_the_rotary_embedding(kind: str) -> None:
    """Rows padded beyond the positions of pretraining have other angles, which they keep."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    most = 64 if kind == "dynamic" else 256
    changes = {"max_position_embeddings": most, "rope_parameters": rope, "initializer_range": 0.2}
    model = keyhole.load(config("llama", **changes), init="random", device="cpu")
    batch = ragged()
    assert model.send([batch], shares=True, joins=True)[0].packed
    ends = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    batch |= {name: torch.nn.functional.pad(batch[name], (0, 60), value=value) for name, value in ends.items()}
    assert_plain_loss(model, batch)


SPARSE = {
    "deepseek_v32": ("index_topk", {}),
    "minimax_m3_vl_text": ("index_block_size", {"index_topk_blocks": 1, "layer_types": ["minimax_m3_sparse"] * 4}),
}


@pytest.mark.parametrize("model_type", SPARSE)
def test_tokens_that_read_a_part_of_their_row_only(model_type: str) -> None:
    """DeepSeek V3.2 reads the tokens of highest score; many scores are 0, and which of them are read depends on their
    place in the row. MiniMax M3 reads the best blocks of the row. Rows that are read as a whole are joined."""
    batch, (name, changes) = ragged(), SPARSE[model_type]
    for count, joined in ((20, False), (64, True)):
        made = tiny_config(model_type, initializer_range=0.1, **changes | {name: count})
        model = keyhole.load(made, init="random", device="cpu", dtype="float32")
        assert model.send([batch], shares=True, joins=True)[0].packed == joined
        assert_plain_loss(model, batch)


def test_packed_rows_of_the_caller_are_tested_for_their_length() -> None:
    """Also if rows were joined before: chunks of attention would cut samples that are packed."""
    model = keyhole.load(config("llama4", attention_chunk_size=64), init="random", device="cpu")
    method = ZO(model, lr=1e-3, seed=3)
    method.step(ragged())
    assert model.send([ragged()], shares=True, joins=True)[0].packed
    ids = torch.randint(3, VOCAB, (2, 100))
    packed = {"input_ids": ids, "labels": ids, "position_ids": (torch.arange(100) % 50).expand(2, -1)}
    with pytest.raises(UserError, match="attention is cut every 64 tokens"):
        method.step(packed)


def test_a_model_with_few_positions_keeps_its_rows() -> None:
    model = keyhole.load(config("gpt2", n_positions=48), init="random", device="cpu")
    (sent,) = model.send([ragged()], shares=True, joins=True)
    assert not sent.packed
    ZO(model, lr=1e-3, seed=3).step(ragged())


@pytest.mark.parametrize("options", [{}, {"rank": 2, "refresh": 3}, {"estimator": "fzoo", "directions": 3}])
def test_streamed_equals_resident(options: dict) -> None:
    models = (load("llama", placement=placement) for placement in ("stream", "resident"))
    steps = [[ragged(30 + 9 * step, step), ragged(24, 90 + step)] for step in range(5)]
    assert_trained_alike(models, lambda model: ZO(model, lr=1e-3, seed=1, **options), steps)


def is_causal(model: keyhole.Model, padded: bool) -> bool:
    return model.row_rules.is_causal(padded)


def changed(change: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]) -> keyhole.Model:
    """A Llama whose first block adds something to its output [B, T, H]. change(output, kwargs of the block)."""
    model = load()
    first = model.module.model.layers[0]
    first.register_forward_hook(lambda module, args, kwargs, x: x + change(x, kwargs), with_kwargs=True)
    return model


def looks_ahead(x_BTH: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    return x_BTH.roll(-1, dims=1) / 10


def looks_ahead_if_masked(x_BTH: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    return 0 * x_BTH if kwargs["attention_mask"] is None else looks_ahead(x_BTH, kwargs)


def looks_at_rows(x_BTH: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    return -x_BTH.mean(dim=0, keepdim=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "opt", "gemma2", "mixtral"])
def test_decoders_pass(name: str, dtype: str) -> None:
    model = load(name, dtype=dtype)
    assert is_causal(model, padded=False) and is_causal(model, padded=True)
    model.close()


def test_a_streamed_decoder_passes() -> None:
    assert is_causal(streamed(load()), padded=True)


def test_padded_rows_are_tested_by_themselves() -> None:
    """Models have other code for rows with a mask."""
    model = changed(looks_ahead_if_masked)
    assert is_causal(model, padded=False) and not is_causal(model, padded=True)


def test_a_model_whose_tokens_have_no_effect_shows_nothing() -> None:
    assert not is_causal(changed(lambda x_BTH, kwargs: -x_BTH), padded=False)


@pytest.mark.parametrize("change", [looks_ahead, looks_ahead_if_masked, looks_at_rows])
def test_rows_of_such_a_model_stay_apart(change: Callable) -> None:
    model, rows = changed(change), of_one_token([2, 3, 2])
    assert len(model.send([rows], shares=True)[0].inputs["input_ids"]) == 7
    assert_plain_loss(model, rows)


def test_cpm_ant_sees_the_whole_row() -> None:
    """A family of Transformers that loads as a decoder and is none."""
    model, rows = keyhole.load(tiny_config("cpmant"), init="random", device="cpu"), of_one_token([2, 3, 2])
    with torch.no_grad():
        ((apart, _),) = nll_by_row(model, model.send([rows]))
    assert torch.equal(model.nll(rows)[0], apart)


def test_the_test_leaves_an_update_that_waits() -> None:
    """Ranks need not make the test together, so it must not flush, which they do together."""
    model = load()
    zo = ZO(model, lr=1e-3, eps=1e-3)
    zo.step(batch())
    before = zo.update.pending
    assert before is not None and is_causal(model, padded=False) and zo.update.pending is before
