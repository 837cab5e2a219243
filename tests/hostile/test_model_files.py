"""Files of a model directory that are damaged or made to harm: config, weights, index, generation settings, tokenizer,
adapters."""

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from keyhole.errors import UserError
from keyhole.loading import load
from tests.hostile.conftest import MANY, Place
from tests.hostile.values import ESCAPE, odd, places_of, with_value, write_json

FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
FILES += [
    "chat_template.jinja",
    "special_tokens_map.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
]
HARMS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00\x80" * 10),
    "null": lambda path: path.write_text("null"),
    "list": lambda path: path.write_text("[]"),
    "number": lambda path: path.write_text("1" * 5000),
    "deep": lambda path: path.write_text('{"a":' * 100_000),
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
    "sparse": lambda path: (path.touch(), os.truncate(path, 2**36)),
}


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_model_is_no_such_file(new_place: Callable[[], Place], file: str) -> None:
    """Each of them empty, binary, another kind of JSON, nested, a pipe, a device, a directory, a loop, 64 GiB of holes:
    the first four fields of a model are needed, so those are refused."""
    for name, harm in HARMS.items():
        place = new_place()
        path = place.model / file
        path.unlink(missing_ok=True)
        harm(path)
        ended = place.checked()
        assert ended.code == 2 or file not in ("config.json", "tokenizer.json", "model.safetensors"), name


@MANY
@given(data=st.data())
def test_odd_values_in_json(new_place: Callable[[], Place], data: st.DataObject) -> None:
    """Any one value of any JSON file of the model replaced by one that does not belong there."""
    place = new_place()
    path = place.model / data.draw(st.sampled_from(["config.json", "generation_config.json", "tokenizer_config.json"]))
    tree = json.loads(path.read_text())
    at = data.draw(st.sampled_from([*places_of(tree), ("quantization_config",), ("auto_map",), ("rope_parameters",)]))
    write_json(path, with_value(tree, at, data.draw(odd)))
    place.run("eval", str(place.model), "--tasks", str(place.data), "--limit", "1", "device=cpu")


@settings(parent=MANY, max_examples=15)
@given(data=st.data())
def test_odd_values_in_a_tokenizer(new_place: Callable[[], Place], data: st.DataObject) -> None:
    place = new_place()
    path = place.model / "tokenizer.json"
    tree = json.loads(path.read_text())
    write_json(path, with_value(tree, data.draw(st.sampled_from(places_of(tree))), data.draw(odd)))
    place.checked()


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


@MANY
@given(data=st.data())
def test_odd_headers_of_safetensors(new_place: Callable[[], Place], data: st.DataObject) -> None:
    """Another value anywhere in the header, or another length of it, or of the file."""
    place = new_place()
    path = place.model / "model.safetensors"
    header, body = header_of(path)
    header = with_value(header, data.draw(st.sampled_from(places_of(header))), data.draw(odd))
    text = json.dumps(header).encode()
    length = data.draw(st.sampled_from([len(text), 0, len(text) - 1, len(text) + 8, 2**63, 2**64 - 1]))
    content = struct.pack("<Q", length) + text + body
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), 4, 100, len(content) - 1]))])
    place.checked()


@MANY
@given(data=st.data())
def test_odd_values_in_an_index(new_place: Callable[[], Place], data: st.DataObject) -> None:
    """Tensors in files that are not there, lie elsewhere, or are no names."""
    place = new_place()
    names = load_file(place.model / "model.safetensors").keys()
    tree = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    places = [*places_of(tree), ("weight_map", ESCAPE)]
    write_json(
        place.model / "model.safetensors.index.json",
        with_value(tree, data.draw(st.sampled_from(places)), data.draw(odd)),
    )
    place.checked()


HUGE: dict[str, dict[str, Any]] = {
    "a width of a billion": {"hidden_size": 10**9},
    "ten million layers": {"num_hidden_layers": 10**7},
    "a vocabulary of a billion": {"vocab_size": 10**9},
    "positions without end": {"max_position_embeddings": 10**15},
    "code from a hub": {"attn_implementation": "someone/kernels"},
    "code of its own": {
        "auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"},
        "model_type": "x",
    },
    "quantized": {"quantization_config": {"quant_method": "fp8"}},
    "another family": {"model_type": ESCAPE},
    "no width": {"hidden_size": 0},
    "another's text_config": {"text_config": {"model_type": "llama"}},
    "text_config of no kind": {"text_config": [1]},
}


@pytest.mark.parametrize("name", HUGE)
def test_a_config_that_asks_for_too_much_is_refused(place: Place, name: str) -> None:
    """Before anything of that size is built, and before any code is fetched or run."""
    path = place.model / "config.json"
    write_json(path, json.loads(path.read_text()) | HUGE[name])
    (place.model / "evil.py").write_text(f"open({str(place.root / 'ran')!r}, 'w')")
    assert place.checked().code == 2


@pytest.mark.parametrize("share", [-0.5, 1.5, float("nan")])
def test_a_dropout_that_is_no_share_is_not_trained(place: Place, share: float) -> None:
    path = place.model / "config.json"
    write_json(path, json.loads(path.read_text()) | {"attention_dropout": share})
    assert "attention_dropout is" in place.refused("train", str(place.config), "method=lomo")


SPLIT = {"type": "Split", "pattern": {"Regex": "(b+)+$"}, "behavior": "Isolated", "invert": False}
ODD_TOKENIZERS: dict[str, Callable[[Any], Any]] = {
    "the tokenizer gives up on a text": lambda tree: tree | {"pre_tokenizer": SPLIT},
    "a token has the id 4,000,000,000": lambda tree: with_value(tree, ("model", "vocab", "a"), 4 * 10**9),
    "tokenizer.json cannot be read: it is no ordinary file": lambda tree: None,
}


@pytest.mark.parametrize("says", ODD_TOKENIZERS)
def test_a_tokenizer_that_fails_is_refused(place: Place, says: str) -> None:
    """Also where its library panics over a text of the data, which is no Exception of Python."""
    path = place.model / "tokenizer.json"
    found = ODD_TOKENIZERS[says](json.loads(path.read_text()))
    path.unlink()
    path.mkdir() if found is None else write_json(path, found)
    write_json(place.data, {"prompt": "b" * 40 + "!", "completion": "c"})
    assert says in place.refused("train", str(place.config), "--dry-run")


def test_a_million_beams_are_refused(place: Place) -> None:
    """Each would be a copy of the cache."""
    path = place.model / "generation_config.json"
    write_json(path, json.loads(path.read_text()) | {"num_beams": 10**6})
    assert "num_beams is 1000000" in place.refused("chat", str(place.model), "device=cpu", stdin="hello\n")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("generation_config.json", {"output_hidden_states": True}),
        ("generation_config.json", {"penalty_alpha": 0.6, "assistant_early_exit": "x"}),
        ("tokenizer_config.json", {"note": "\ud800"}),
        ("config.json", {"note": "\ud800"}),
    ],
)
def test_what_could_not_be_saved_is_not_trained(place: Place, file: str, change: dict[str, Any]) -> None:
    """Settings that load and cannot be written are met before the first step, not at the end of the run."""
    path = place.model / file
    write_json(path, json.loads(path.read_text()) | change)
    ended = place.trained()
    assert ended.code == (0 if (place.out / "model.safetensors").exists() else 2), ended.printed


class Evil:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickles_run_nothing(place: Place) -> None:
    """Weights in a .bin, and a training_args.bin beside them."""
    (place.model / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "training_args.bin"):
        torch.save({"model.norm.weight": Evil(place.root / "ran")}, place.model / name)
    assert "holds more than tensors" in place.refused("train", str(place.config))


NAME = "model.layers.0.self_attn.q_proj.weight"
NOT_PLAIN: dict[str, Callable[[torch.Tensor], Any]] = {
    "stride 0": lambda x: x[:1, :1].clone().expand(x.shape),
    "sparse": torch.Tensor.to_sparse,
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.strided),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*NOT_PLAIN, "int key", "compressed"])
def test_odd_tensors_in_a_bin_are_refused(place: Place, kind: str) -> None:
    """By the name of the tensor; and an archive whose bytes are no weights as they lie there."""
    tensors: dict[Any, Any] = load_file(place.model / "model.safetensors")
    (place.model / "model.safetensors").unlink()
    path = place.model / "pytorch_model.bin"
    changed = NOT_PLAIN.get(kind, torch.clone)(tensors[NAME])
    torch.save(tensors | {5 if kind == "int key" else NAME: changed}, path)
    if kind == "compressed":
        with zipfile.ZipFile(path) as plain:
            records = {name: plain.read(name) for name in plain.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            _ = [packed.writestr(name, content) for name, content in records.items()]
    says = {"int key": "no table of tensors by name", "compressed": "records of its archive are compressed"}
    assert says.get(kind, f"{NAME} is no plain tensor") in place.refused("train", str(place.config), "--dry-run")


@pytest.mark.parametrize("seed", ["x", 1.5, -1, None, 2**70])
def test_a_seed_that_is_none_is_refused(tiny_model: Path, seed: Any) -> None:
    with pytest.raises(UserError, match="seed: found .*expected whole number"):
        load(tiny_model, seed=seed)


ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@MANY
@given(data=st.data())
def test_odd_adapters(new_place: Callable[[], Place], data: st.DataObject) -> None:
    """Adapters with other settings, shapes, names or numbers than those of the model."""
    place = new_place()
    folder = place.model / "adapter"
    folder.mkdir()
    known = ADAPTER | {"base_model_name_or_path": str(place.model)}
    at = data.draw(st.sampled_from([*places_of(known), ("auto_mapping",), ("modules_to_save",), ("rank_pattern",)]))
    write_json(folder / "adapter_config.json", with_value(known, at, data.draw(odd)))
    start = data.draw(st.sampled_from(["base_model.model.model.layers.0.self_attn.q_proj", "x", ESCAPE]))
    shape = data.draw(st.sampled_from([(2, 32), (32, 2), (0,), (2, 32, 1)]))
    save_file({f"{start}.lora_A.weight": torch.ones(shape)}, folder / "adapter_model.safetensors")
    if data.draw(st.booleans()):
        (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    place.run("eval", str(place.model), "--tasks", str(place.data), "--limit", "1", "device=cpu")
