"""Tensors of the files that the model has no place for are named, and codes are not taken for weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import keyhole
from keyhole.errors import UserError


def altered(source: Path, target: Path, extra: dict[str, torch.Tensor], **config: Any) -> Path:
    """A copy of a model with other tensors and other entries in its config."""
    shutil.copytree(source, target)
    save_file(load_file(source / "model.safetensors") | extra, target / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(known | config))
    return target


def said(directory: Path) -> list[str]:
    return [line for line in keyhole.load(directory, device="cpu").describe() if "left out" in line]


def test_what_is_left_out_is_named(tiny_model: Path, tmp_path: Path) -> None:
    """A tensor of nobody; a config with a layer less than the files. Not: tables that every model computes."""
    assert said(tiny_model) == []
    assert said(altered(tiny_model, tmp_path / "t", {"model.rotary_emb.inv_freq": torch.ones(4)})) == []
    (line,) = said(altered(tiny_model, tmp_path / "e", {"extra.weight": torch.ones(3)}))
    assert "1 tensor of the files" in line and line.endswith("extra.weight")
    layers = json.loads((tiny_model / "config.json").read_text())["num_hidden_layers"]
    (line,) = said(altered(tiny_model, tmp_path / "l", {}, num_hidden_layers=layers - 1))
    assert "9 tensors" in line and f"model.layers.{layers - 1}." in line and "and 6 more" in line


def test_codes_are_not_taken_for_weights(tiny_model: Path, tmp_path: Path) -> None:
    """Whole numbers, and 8-bit numbers with a scale beside them, though the config says nothing of quantisation."""
    name = "model.layers.0.mlp.up_proj.weight"
    w = load_file(tiny_model / "model.safetensors")[name]
    with pytest.raises(UserError, match=rf"{name} in int8: codes"):
        said(altered(tiny_model, tmp_path / "i", {name: w.to(torch.int8)}))
    eight = {name: w.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1)}
    with pytest.raises(UserError, match=f"{name}_scale_inv beside {name}, which is quantised"):
        said(altered(tiny_model, tmp_path / "f", eight))
