"""Matrices cut by rows: the same bits wherever they live, close to the uncut product, and less memory."""

import random
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.workload import Workload
from keyhole.methods.zo.method import ZO
from keyhole.model.structure import find as blocks
from keyhole.model.structure.layout import ALIGN, find_layout
from keyhole.model.structure.skeleton import build
from keyhole.plan import fit
from tests.matrix import in_every_run
from tests.model.decoders import batch, config, load
from tests.model.streaming import assert_trained_alike, streamed

FAMILIES = ["opt", "llama", "qwen2", "phi", "gptj", "mixtral", "gemma2", "bloom"]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of more than 1000 elements count as large: most of those in a tiny decoder."""
    monkeypatch.setattr(blocks, "TILE_NUMEL", 1000)
    monkeypatch.setattr(blocks, "TILE_ROWS", 8)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FAMILIES)
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
    spine = {tensor.name for tensor in layout.spine.tensors}
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    for tensor_name, rows in tiles.items():
        assert rows[0][0] == 0 and rows[-1][1] == shapes[tensor_name][0] and len(rows) > 1
        assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))
        bias = tensor_name.replace("weight", "bias")
        assert bias not in shapes or bias in spine
    assert not any(unit.rows for unit in find_layout(module, 1, cut_rows=False).of_kind("block"))


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_tiles_equal_resident_ones(name: str, request: pytest.FixtureRequest) -> None:
    one, options = batch(), {"max_new_tokens": 4, "do_sample": False}
    uncut_B = load(name).nll(one)[0]
    request.getfixturevalue("small_tiles")
    resident = load(name)
    other = streamed(resident, 1, chaos=random.Random(0))
    assert any(unit.rows for unit in other.layout.of_kind("block"))
    nll_B = resident.nll(one)[0]
    assert torch.equal(other.nll([one, batch(3, 5)])[0][0], nll_B)
    assert torch.equal(other.generate(one["input_ids"], **options), resident.generate(one["input_ids"], **options))
    torch.testing.assert_close(nll_B, uncut_B, rtol=1e-5, atol=1e-5)


@in_every_run(lambda name, dtype: (name, dtype) in (("opt", "float32"), ("mixtral", "bfloat16")))
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["opt", "llama", "mixtral"])
def test_training_in_tiles(name: str, dtype: str) -> None:
    resident = load(name, dtype=dtype)
    other = streamed(resident, 1, slot_count=2, chaos=random.Random(1))
    steps = [[batch(2, 8, seed=1), batch(1, 5, seed=2)]] * 3
    assert_trained_alike([resident, other], lambda model: ZO(model, 1e-3, directions=2, weight_decay=0.01), steps)


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
