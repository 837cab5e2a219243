"""What weight files must be to be read, and weights drawn from a seed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import keyhole
from keyhole.disk.weight_files import gguf_settings
from keyhole.errors import UserError
from keyhole.model.weights.fit import find_fit, match_names
from tests.disk.published import write_gguf
from tests.model import encoders
from tests.model.decoders import config


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
    assert said(tiny_model) == []
    assert said(altered(tiny_model, tmp_path / "t", {"model.rotary_emb.inv_freq": torch.ones(4)})) == []
    with pytest.warns(UserWarning, match=r"^weights: 1 tensor of the files .* extra\.weight$"):
        (line,) = said(altered(tiny_model, tmp_path / "e", {"extra.weight": torch.ones(3)}))
    assert "1 tensor of the files" in line and line.endswith("extra.weight")
    layers = json.loads((tiny_model / "config.json").read_text())["num_hidden_layers"]
    with pytest.warns(UserWarning, match="9 tensors of the files left out"):
        (line,) = said(altered(tiny_model, tmp_path / "l", {}, num_hidden_layers=layers - 1))
    assert "9 tensors" in line and f"model.layers.{layers - 1}." in line and "and 6 more" in line


@pytest.mark.parametrize("name", ["model.shift", "shift"])
@pytest.mark.parametrize("in_file", ["model.shift", "shift"])
def test_a_saved_buffer_has_its_name_with_or_without_the_prefix(
    name: str, in_file: str, tiny_model: Path, tmp_path: Path
) -> None:
    """In the module and in the files; one that no file has is left as it is."""
    model = keyhole.load(tiny_model, device="cpu")
    (model.module.model if "." in name else model.module).register_buffer("shift", torch.zeros(3))
    parameters = match_names(model.module, model.layout, tiny_model)
    assert name not in parameters and len(parameters) == len(model.layout.tensors)
    found = match_names(model.module, model.layout, altered(tiny_model, tmp_path / "m", {in_file: torch.ones(3)}))
    assert found == parameters | {name: in_file}


def test_a_head_for_another_number_of_labels_is_drawn(tmp_path: Path) -> None:
    """Where a head may be: its last layer is left out, all else is read; with as many labels nothing is left out."""
    AutoModelForSequenceClassification.from_config(encoders.config("bert", 3)).save_pretrained(tmp_path)
    last = {"classifier.weight", "classifier.bias"}
    for labels, lacks in ((3, set()), (2, last)):
        model = keyhole.load(encoders.config("bert", labels), init="random", device="cpu")
        everything = frozenset(tensor.name for tensor in model.layout.tensors)
        for may_lack in (frozenset(last), everything):
            found = match_names(model.module, model.layout, tmp_path, may_lack)
            assert found.keys() == everything - lacks
    with pytest.raises(UserError, match=r"holds classifier.weight with shape \(3, 32\); config.json says \(2, 32\)"):
        find_fit(model.module, model.layout, tmp_path)


def test_names_that_transformers_must_match_are_read_by_it(tmp_path: Path) -> None:
    """Experts one by one, where the module has stacks of them: the same weights; what is missing is named, and so is
    what is left over."""
    theirs = AutoModelForCausalLM.from_config(config("mixtral"))
    theirs.save_pretrained(tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert any(".experts.1." in name for name in stored)
    model = keyhole.load(tmp_path / "m", device="cpu", dtype="float32")
    assert match_names(model.module, model.layout, tmp_path / "m") is None
    mine = dict(model.named_tensors())
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.named_parameters() if name in mine)
    assert len(mine) == len(model.layout.tensors)
    assert "extra" in said(altered(tmp_path / "m", tmp_path / "e", {"extra": torch.ones(3)}))[0]
    (tmp_path / "m" / "model.safetensors").unlink()
    del stored["model.norm.weight"]
    save_file(stored, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model.norm.weight \(1 tensors\); is it the right checkpoint"):
        keyhole.load(tmp_path / "m", device="cpu")


def test_codes_are_not_taken_for_weights(tiny_model: Path, tmp_path: Path) -> None:
    """Whole numbers, and 8-bit numbers with a scale beside them, though the config says nothing of quantisation."""
    name = "model.layers.0.mlp.up_proj.weight"
    w = load_file(tiny_model / "model.safetensors")[name]
    with pytest.raises(UserError, match=rf"{name} as whole numbers \(I8\): codes"):
        said(altered(tiny_model, tmp_path / "i", {name: w.to(torch.int8)}))
    eight = {name: w.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1)}
    with pytest.raises(UserError, match=f"{name}_scale_inv beside {name}, which is quantised"):
        said(altered(tiny_model, tmp_path / "f", eight))


def test_a_tied_tensor_with_two_values_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    table = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"]
    tie = {"tie_word_embeddings": True}
    same = altered(tiny_model, tmp_path / "same", {"lm_head.weight": table.clone()}, **tie)
    assert keyhole.load(same, device="cpu").layout.tied
    other = altered(tiny_model, tmp_path / "other", {}, **tie)
    with pytest.raises(UserError, match=r"lm_head\.weight with different values"):
        keyhole.load(other, device="cpu")


def test_a_tensor_in_two_shards_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """The index names one file for it; the other would have been read, or not, by the order of their names."""
    shutil.copytree(tiny_model, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "model.safetensors").unlink()
    files, names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), list(weights)
    halves = names[::2], names[1::2]
    save_file({name: weights[name] for name in halves[0]}, tmp_path / "m" / files[0])
    save_file({name: weights[name] for name in (*halves[1], names[0])}, tmp_path / "m" / files[1])
    index = {"weight_map": {name: file for file, half in zip(files, halves, strict=True) for name in half}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{names[0]} twice"):
        keyhole.load(tmp_path / "m", device="cpu")


def test_weights_that_are_rounded_are_said(tiny_model: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    wide = altered(tiny_model, tmp_path / "w", {name: tensor.double() for name, tensor in weights.items()})
    (line,) = [line for line in keyhole.load(wide, device="cpu").describe() if "rounded" in line]
    assert "rounded to float32" in line and f"{len(weights)} in float64" in line
    assert not [line for line in keyhole.load(tiny_model, device="cpu").describe() if "rounded" in line]


def change(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | values))


OTHER = {  # key of config.json -> (its value there, what the file says)
    "num_attention_heads": (2, "attention.head_count = 4"),
    "num_key_value_heads": (1, "attention.head_count_kv = 2"),
    "hidden_size": (64, "embedding_length = 32"),
    "intermediate_size": (32, "feed_forward_length = 64"),
    "num_hidden_layers": (3, "block_count = 2"),
    "rms_norm_eps": (1e-5, "attention.layer_norm_rms_epsilon = 1e-06"),
    "rope_theta": (5e5, "rope.freq_base = 10000"),
}


@pytest.mark.parametrize("wire", [None, "int4"])
@pytest.mark.parametrize("key", OTHER)
def test_a_config_of_another_model_is_refused(key: str, wire: str | None, tiny_model: Path, tmp_path: Path) -> None:
    write_gguf(tiny_model, tmp_path / "in", "Q4_0")
    (value, says) = OTHER[key]
    change(tmp_path / "in", **{key: value} if key != "rope_theta" else {"rope_parameters": {"rope_theta": value}})
    with pytest.raises(UserError, match=rf"model.gguf says {says}, but config.json .* {key} = {value:g}"):
        keyhole.load(tmp_path / "in", device="cpu", dtype="float32", wire=wire)


def test_what_agrees_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    """Up to float32's digits; a config with fewer layers is warned of, and no more; other files say nothing."""
    write_gguf(tiny_model, tmp_path / "in", "Q4_0")
    change(tmp_path / "in", rms_norm_eps=1.0000001e-6)
    keyhole.load(tmp_path / "in", device="cpu", dtype="float32")
    change(tmp_path / "in", num_hidden_layers=1)
    keyhole.load(tmp_path / "in", device="cpu", dtype="float32")
    assert gguf_settings(tiny_model) == {}


def test_matrices_are_normal_and_differ() -> None:
    made = config("llama", initializer_range=0.05)
    model = keyhole.load(made, init="random", device="cpu")
    matrices = {name: x for name, x in model.named_tensors() if x.ndim > 1}
    for name, x in matrices.items():
        assert abs(float(x.mean())) < 0.01 and abs(float(x.std()) - 0.05) < 0.005, name
    firsts = [tuple(x.flatten()[:64].tolist()) for x in matrices.values()]
    assert len(set(firsts)) == len(firsts)
    assert all(torch.equal(x, torch.ones_like(x)) for _, x in model.named_tensors() if x.ndim == 1)
    other = keyhole.load(made, init="random", device="cpu", placement="stream")
    assert all(torch.equal(x, matrices[name]) for name, x in other.named_tensors() if x.ndim > 1)
