"""Formats of weights at home: plain, 8 bits that can be changed, and frozen ones in 8 or 4 bits."""

from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights import homes
from keyhole.model.weights.format import PACKED, Wire, bytes_per_element, is_matrix
from keyhole.ops.lowbit import Grid, lowbit_decode, lowbit_encode_
from tests.model.decoders import batch, config


@pytest.mark.parametrize("wire, stored", [(None, 2), ("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 65 / 64)])
def test_units_are_stored_in_their_format(wire: str | None, stored: float) -> None:
    """Without one, in the dtype of compute, as are common, table and head beside fp8, which has a scale for each 64."""
    formats = Wire(torch.bfloat16, wire)
    for unit in find_layout(build(config("llama"), torch.bfloat16), max_unit_numel=1).units:
        packed, dtype = wire == "fp8" and unit.kind == "block", formats.home_dtype(unit)
        assert formats.home_bytes(unit) == (stored if packed or wire != "fp8" else 2) * unit.numel
        assert dtype == PACKED if packed else dtype.itemsize * unit.numel == formats.home_bytes(unit)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UserError, match="wire: 'int3' is not one of fp32, bf16, fp16, fp8"):
        Wire(torch.bfloat16, "int3")


WIRES = ("int8", "int4", "nf4")


def load(name: str = "llama", wire: str | None = "int4", **options: object) -> keyhole.Model:
    return keyhole.load(config(name), init="random", device="cpu", wire=wire, **options)


def on_grid(w: torch.Tensor, grid: Grid) -> torch.Tensor:
    """What a tensor becomes by itself, padded with zeros to whole groups."""
    flat = torch.zeros(-(-w.numel() // 64) * 64)
    flat[: w.numel()] = w.float().view(-1)
    codes = torch.empty(grid.code_bytes(flat.numel()), dtype=torch.uint8)
    scales = torch.empty(grid.scale_count(flat.numel()), dtype=torch.float16)
    lowbit_encode_(flat, codes, scales, grid)
    out = torch.empty(flat.numel(), dtype=w.dtype)
    lowbit_decode(codes, scales, out, grid)
    return out[: w.numel()].view(w.shape)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "mixtral"])
def test_matrices_of_blocks_are_on_the_grid_and_the_rest_is_untouched(name: str, wire: str) -> None:
    """Biases lie between the matrices of OPT and GPT-2, and experts are one tensor in Mixtral."""
    plain, packed = load(name, None), load(name, wire, dtype="bfloat16")
    for mine, theirs in zip(packed.layout.tensors, plain.layout.tensors, strict=True):
        in_block = packed.homes.unit_of(mine).kind == "block"
        expected = plain.home(theirs)
        if in_block and is_matrix(mine.shape):
            expected = on_grid(expected, Grid(wire))
        assert torch.equal(packed.home(mine), expected.bfloat16()), mine.name
    blocks = packed.layout.of_kind("block")
    assert all(packed.engine.homes[u.index].dtype == PACKED for u in blocks)
    assert all(packed.engine.homes[u.index].numel() == packed.formats.home_bytes(u) for u in blocks)


def test_bytes_per_parameter() -> None:
    assert [round(bytes_per_element(wire), 3) for wire in WIRES] == [1.031, 0.531, 0.531]
    model = load("llama", "int4", dtype="bfloat16")
    for unit in model.layout.of_kind("block"):
        vectors = sum(t.shape.numel() for t in unit.tensors if not is_matrix(t.shape))
        assert model.formats.home_bytes(unit) <= 0.53125 * (unit.numel - vectors) + 2 * vectors + 3 * 16


@pytest.mark.parametrize("wire", WIRES)
def test_evaluation_is_that_of_the_unpacked_model_in_any_placement(wire: str) -> None:
    packed, plain = load(wire=wire), load(wire=None)
    away = load(wire=wire, placement="stream")
    for mine, theirs in zip(packed.layout.tensors, plain.layout.tensors, strict=True):
        plain.home(theirs).copy_(packed.home(mine))
    one = batch(seed=5)
    expected = plain.nll(one)[0]
    assert torch.equal(packed.nll(one)[0], expected) and torch.equal(away.nll(one)[0], expected)
    tokens = [m.generate(one["input_ids"][:, :4], max_new_tokens=4, do_sample=False) for m in (packed, away, plain)]
    assert torch.equal(tokens[0], tokens[2]) and torch.equal(tokens[1], tokens[2])


def test_large_tensors_are_packed_in_pieces(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    whole = [load(), keyhole.load(tiny_model, device="cpu", wire="nf4")]
    monkeypatch.setattr(homes, "PIECE", 256)
    pieces = [load(), keyhole.load(tiny_model, device="cpu", wire="nf4")]
    for a, b in zip(whole[1].engine.homes, pieces[1].engine.homes, strict=True):
        assert torch.equal(a, b)


def test_what_is_not_finite_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model, tmp_path / "bad")
    weights = load_file(tmp_path / "bad" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(weights, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="up_proj.weight holds NaN or infinity: its weights are damaged; fetch"):
        keyhole.load(tmp_path / "bad", device="cpu", wire="int4")


def test_what_is_saved_is_the_unpacked_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = load()
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    nll_B, count_B = model.nll(batch())
    torch.testing.assert_close(nll_B.sum(), again(**batch()).loss * count_B.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["LOMO", "ZO", "LSP", "AdamOffload", "AdamW", "AdaLOMO"])
def test_methods_that_would_change_the_weights_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="wire|dtype it computes in"):
        getattr(keyhole, name)(load())
