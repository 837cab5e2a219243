"""Experts as units of their own: the bits of the resident model, the numbers of Transformers, and less traffic."""

import functools
import random

import pytest
import torch

import keyhole
from keyhole.methods.zo import write_back
from keyhole.methods.zo.method import ZO
from keyhole.model.structure import find as stacks
from keyhole.model.structure.layout import ALIGN, find_layout
from keyhole.model.structure.skeleton import build
from tests.matrix import in_every_run
from tests.model.decoders import batch, config, hf_nll, load
from tests.model.streaming import assert_trained_alike, streamed

FAMILIES = ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]


@pytest.fixture
def small_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stack of experts counts as large."""
    monkeypatch.setattr(stacks, "STACK_NUMEL", 0)


@pytest.mark.usefixtures("small_stacks")
@pytest.mark.parametrize("name", FAMILIES)
def test_stacks_are_cut_into_experts(name: str) -> None:
    module = build(config(name), torch.float32)
    layout, whole = find_layout(module, 1), find_layout(module)
    assert layout.tensors == whole.tensors and layout.has_expert_units and not whole.has_expert_units
    for one, after in zip(layout.units, layout.units[1:], strict=False):
        assert one.stop == after.start
    for tensor in layout.tensors:
        units = [u for u in layout.units if u.expert is not None and u.tensors[0] is tensor]
        assert len(units) == tensor.experts
        for e, unit in enumerate(units):
            own = tensor.expert(e)
            assert unit.expert == e and unit.start == own.start and own.stop <= unit.stop < own.stop + ALIGN
    if name == "gpt_oss":
        assert {t.name for t in layout.spine.tensors} > {t.name for t in layout.tensors if "proj_bias" in t.name}
    assert not find_layout(module, 1, cut_experts=False).has_expert_units


@pytest.mark.usefixtures("small_stacks")
def test_whole_stacks_on_request() -> None:
    """expert_units=False is Transformers' own layer, to the bit, with a stack as one unit."""
    model = load("mixtral", expert_units=False)
    other = load("mixtral")
    assert other.layout.experts and not model.layout.experts and not find_layout(model.module, 1).has_expert_units
    one = {name: x for name, x in batch().items() if name == "input_ids"}
    with torch.enable_grad():  # outside of a reverse: Transformers' own
        theirs = other.module(**one, use_cache=False).logits
    assert torch.equal(model.module(**one, use_cache=False).logits, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_experts_equal_resident_ones(name: str, request: pytest.FixtureRequest) -> None:
    one, options = batch(), {"max_new_tokens": 4, "do_sample": False}
    whole = load(name)
    theirs_B = hf_nll(whole.module, one)
    request.getfixturevalue("small_stacks")
    resident = load(name)
    assert resident.layout.experts and not whole.layout.experts
    other = streamed(resident, 1, chaos=random.Random(0))
    nll_B = resident.nll(one)[0]
    assert torch.equal(other.nll([one, batch(3, 5), batch(1, 1, seed=3)])[0][0], nll_B)
    assert torch.equal(other.generate(one["input_ids"], **options), resident.generate(one["input_ids"], **options))
    torch.testing.assert_close(hf_nll(resident.module, one), nll_B, rtol=1e-5, atol=1e-5)
    if name != "gpt_oss":  # whose biases lie elsewhere, and are drawn in another order
        torch.testing.assert_close(nll_B, theirs_B, rtol=1e-5, atol=1e-5)


@in_every_run(lambda name: name != "qwen2_moe")
@pytest.mark.usefixtures("small_stacks")
@pytest.mark.parametrize(
    ("name", "dtype", "directions"),
    [("mixtral", "bfloat16", 2), ("qwen2_moe", "float32", 1), ("gpt_oss", "float32", 1), ("deepseek_v3", "float32", 1)],
)
def test_zo_with_streamed_experts(name: str, dtype: str, directions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_back, "UNMET", 2)
    resident = load(name, dtype=dtype)
    other = streamed(resident, 1, chaos=random.Random(1))
    steps = [[batch(1, 2, seed=i), batch(1, 3, seed=9 + i)] for i in range(3)]
    make = functools.partial(ZO, lr=1e-2, directions=directions, weight_decay=0.1)
    assert_trained_alike([resident, other], make, steps)


@pytest.mark.usefixtures("small_stacks")
def test_zo_leaves_experts_that_nobody_met_at_home() -> None:
    """They are owed the updates of all steps, and cross the link for none; a flush brings them up to date."""
    resident = keyhole.load(config("mixtral", num_local_experts=8), init="random", device="cpu")
    model = streamed(resident, 1)
    one = {name: x[:, :1] for name, x in batch(1, 4).items()} | {"labels": batch(1, 4)["input_ids"][:, :1]}
    pair = [ZO(which, lr=1e-3) for which in (resident, model)]
    for _ in range(3):
        for zo in pair:
            zo.step(one)
    experts = [u for u in model.layout.units if u.expert is not None]
    owed = [len(pair[1].update.owed(u)) for u in experts]
    assert set(owed) == {1, 3} and owed.count(3) >= len(experts) / 2
    assert not {u.index for u, n in zip(experts, owed, strict=True) if n == 3} & set(model.engine.visited)
    for (_, mine), (_, theirs) in zip(resident.named_tensors(), model.named_tensors(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("small_stacks")
def test_only_experts_that_tokens_met_cross_the_link() -> None:
    model = streamed(load("mixtral"), 1)
    units, blocks = model.layout.units, model.layout.block_count
    model.nll([batch(1, 4, seed=seed) for seed in range(3)])
    visited = model.engine.visited
    assert len(visited) == len(set(visited))
    before = model.engine.bytes_up
    model.nll({name: x[:, :1] for name, x in batch(1, 4).items()})
    met = [units[page] for page in model.engine.visited if units[page].expert is not None]
    assert len(met) == blocks * 2 * 2  # experts of a token, stacks
    others = [u for u in units[1:] if u.expert is None and u.kind != "table"]
    guessed = 2 * max(u.numel for u in units) * 4  # a slot or two that were filled by the order of the sweep before
    assert model.engine.bytes_up - before <= 4 * sum(u.numel for u in others + met) + blocks * guessed
