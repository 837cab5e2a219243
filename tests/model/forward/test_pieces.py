"""Layers of which a piece is on the device at a time: the same bits wherever they live, the numbers of the whole layer,
less memory and less traffic."""

import random
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.workload import Workload
from keyhole.methods.zo import write_back
from keyhole.methods.zo.method import ZO
from keyhole.model.structure import find
from keyhole.model.structure.layout import ALIGN, find_layout
from keyhole.model.structure.skeleton import build
from keyhole.plan import fit
from tests.matrix import in_every_run
from tests.model.decoders import batch, config, hf_nll, load
from tests.model.streaming import assert_trained_alike, streamed

TILED = ["opt", "llama", "qwen2", "phi", "gptj", "mixtral", "gemma2", "bloom"]
WITH_EXPERTS = ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of more than 1000 elements count as large: most of those in a tiny decoder."""
    monkeypatch.setattr(find, "TILE_NUMEL", 1000)
    monkeypatch.setattr(find, "TILE_ROWS", 8)


@pytest.fixture
def small_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stack of experts counts as large."""
    monkeypatch.setattr(find, "STACK_NUMEL", 0)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", TILED)
def test_tiles_cover_their_matrix(name: str) -> None:
    module = build(config(name), torch.float32)
    layout, whole = find_layout(module, 1), find_layout(module)
    assert layout.tensors == whole.tensors and layout.parts.tiled_layers == whole.parts.tiled_layers > 0
    for one, after in zip(layout.units, layout.units[1:], strict=False):
        assert one.stop == after.start and one.start % ALIGN == 0
    tiles: dict[str, list[tuple[int, int]]] = {}
    for unit in layout.of_kind("block"):
        if unit.rows:
            tensor, (first, last) = unit.tensors[0], unit.rows
            tiles.setdefault(tensor.name, []).append(unit.rows)
            assert unit.start == tensor.start + first * tensor.shape[1] and unit.numel <= 1000 + 8 * tensor.shape[1]
            assert last == tensor.shape[0] or last % 8 == 0
    common = {tensor.name for tensor in layout.common.tensors}
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    for tensor_name, rows in tiles.items():
        assert rows[0][0] == 0 and rows[-1][1] == shapes[tensor_name][0] and len(rows) > 1
        assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))
        bias = tensor_name.replace("weight", "bias")
        assert bias not in shapes or bias in common
    assert not any(unit.rows for unit in find_layout(module, 1, cut_rows=False).of_kind("block"))


@pytest.mark.usefixtures("small_stacks")
@pytest.mark.parametrize("name", WITH_EXPERTS)
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
        assert {t.name for t in layout.common.tensors} > {t.name for t in layout.tensors if "proj_bias" in t.name}
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


@pytest.mark.parametrize(
    ("pieces", "name"), [("small_tiles", name) for name in TILED] + [("small_stacks", name) for name in WITH_EXPERTS]
)
def test_streamed_pieces_equal_resident_ones(pieces: str, name: str, request: pytest.FixtureRequest) -> None:
    """And the layers of Transformers, up to rounding."""
    one, options = batch(), {"max_new_tokens": 4, "do_sample": False}
    whole_B = load(name).nll(one)[0]
    request.getfixturevalue(pieces)
    resident = load(name)
    other = streamed(resident, 1, chaos=random.Random(0))
    assert any(unit.rows for unit in other.layout.of_kind("block"))
    nll_B = resident.nll(one)[0]
    assert torch.equal(other.nll([one, batch(3, 5), batch(1, 1, seed=3)])[0][0], nll_B)
    assert torch.equal(other.generate(one["input_ids"], **options), resident.generate(one["input_ids"], **options))
    torch.testing.assert_close(hf_nll(resident.module, one), nll_B, rtol=1e-5, atol=1e-5)
    if name != "gpt_oss":  # whose biases lie elsewhere, and are drawn in another order
        torch.testing.assert_close(nll_B, whole_B, rtol=1e-5, atol=1e-5)


@in_every_run(lambda pieces, name, dtype: name != "qwen2_moe" and (name, dtype) != ("llama", "bfloat16"))
@pytest.mark.parametrize(
    ("pieces", "name", "dtype"),
    [("small_tiles", name, dtype) for name in ("opt", "llama", "mixtral") for dtype in ("float32", "bfloat16")]
    + [("small_stacks", "mixtral", "bfloat16")]
    + [("small_stacks", name, "float32") for name in ("qwen2_moe", "gpt_oss", "deepseek_v3")],
)
def test_zo_with_streamed_pieces(
    pieces: str, name: str, dtype: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(pieces)
    monkeypatch.setattr(write_back, "UNMET", 2)
    resident = load(name, dtype=dtype)
    other = streamed(resident, 1, chaos=random.Random(1))
    steps = [[batch(2, 8, seed=i), batch(1, 3, seed=9 + i)] for i in range(3)]
    assert_trained_alike([resident, other], lambda model: ZO(model, 1e-2, directions=2, weight_decay=0.1), steps)


@pytest.mark.parametrize("wire", [None, "bf16", "fp8"])
def test_a_budget_that_only_tiles_fit(wire: str | None, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    made = config("llama", intermediate_size=512, vocab_size=64)
    work = Workload(tokens=8, passes=2)
    options = {"init": "random", "device": "cpu", "placement": "stream", "workload": work, "wire": wire}
    with pytest.raises(UserError, match="below the minimum"):
        keyhole.load(made, gpu_memory="250KiB", **options)
    request.getfixturevalue("small_tiles")
    if wire == "fp8":
        with pytest.raises(UserError, match="below the minimum"):
            keyhole.load(made, gpu_memory="250KiB", **options)
        return
    model = keyhole.load(made, gpu_memory="250KiB", **options)
    assert any("computed in tiles" in line for line in model.describe())
    one = {key: value % 64 for key, value in batch(1, 8).items()}
    nll_B = model.nll(one)[0]
    model.save_pretrained(tmp_path / "saved")
    back = keyhole.load(tmp_path / "saved", device="cpu", dtype="float32")
    assert torch.equal(back.nll(one)[0], nll_B)


@pytest.mark.usefixtures("small_tiles")
def test_with_gradients_matrices_are_whole() -> None:
    model, one = load("opt"), batch()
    with torch.enable_grad():
        model.module(**one).loss.backward()
    assert all(tensor.param.grad is not None for tensor in model.layout.tensors)
    made = config("llama", intermediate_size=512)
    options = {"init": "random", "device": "cpu", "placement": "stream", "gpu_memory": "2MiB"}
    lomo = keyhole.load(made, workload=Workload(method="lomo", tokens=8), **options)
    assert not any(unit.rows for unit in lomo.layout.of_kind("block"))
    other = streamed(model, 1)
    layer = other.module.model.decoder.layers[0].fc1
    other.conductor = other
    with torch.enable_grad(), pytest.raises(UserError, match="forward passes only"):
        layer(torch.zeros(1, 32))


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", ["opt", "llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_on_a_gpu(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "UNIT_BYTES", 4)
    options = {"init": "random", "device": "cuda", "dtype": dtype}
    resident = keyhole.load(config(name), **options)
    other = keyhole.load(config(name), placement="stream", chaos=random.Random(2), **options)
    assert any(unit.rows for unit in other.layout.of_kind("block"))
    assert_trained_alike([resident, other], lambda model: ZO(model, 1e-3), [[batch(2, 8)]] * 3)


@pytest.mark.usefixtures("small_stacks")
def test_zo_leaves_experts_that_nobody_met_at_home() -> None:
    """They still lack the updates of all steps, and cross the link for none; a flush brings them up to date."""
    resident = keyhole.load(config("mixtral", num_local_experts=8), init="random", device="cpu")
    model = streamed(resident, 1)
    one = {name: x[:, :1] for name, x in batch(1, 4).items()} | {"labels": batch(1, 4)["input_ids"][:, :1]}
    pair = [ZO(which, lr=1e-3) for which in (resident, model)]
    for _ in range(3):
        for zo in pair:
            zo.step(one)
    experts = [u for u in model.layout.units if u.expert is not None]
    deferred = [len(pair[1].update.deferred(u)) for u in experts]
    assert set(deferred) == {1, 3} and deferred.count(3) >= len(experts) / 2
    assert not {u.index for u, n in zip(experts, deferred, strict=True) if n == 3} & set(model.engine.visited)
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
