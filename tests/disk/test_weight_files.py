"""What the weight files of a directory hold, and their hash."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from keyhole.disk.weight_files import (
    INDEX,
    content_hash,
    has_weights,
    is_pickled,
    open_shard,
    read_header,
    stored_tensors,
    stored_weights,
    tensors_hash,
    weight_files,
)
from keyhole.errors import UserError
from tests.disk.published import write_gguf


def test_files_do_not_matter_and_bits_do(tiny_model: Path, tmp_path: Path) -> None:
    """The same weights in other shards hash the same; one flipped bit in one tensor does not."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path / "cut", max_shard_size="30KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    whole = content_hash(tiny_model)
    assert content_hash(tmp_path / "cut") == whole and len(whole) == 64
    file = sorted((tmp_path / "cut").glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert content_hash(tmp_path / "cut") != whole


def test_a_short_file_is_named(tiny_model: Path, tmp_path: Path) -> None:
    """A truncated file is the user's mistake, not a hash of what is left."""
    content = (tiny_model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        content_hash(tmp_path)
    with pytest.raises(UserError, match="has no weights"):
        content_hash(tmp_path / "nowhere")
    assert "model.norm.weight" in read_header(tiny_model / "model.safetensors")[0]


def test_a_gguf_has_a_hash_of_its_bytes(tiny_model: Path, tmp_path: Path) -> None:
    """So that a run on it has a journal, and can be resumed: the same file under another name, and one flipped bit."""
    write_gguf(tiny_model, tmp_path / "in", "Q8_0")
    found, file = content_hash(tmp_path / "in"), next((tmp_path / "in").glob("*.gguf"))
    file = file.rename(file.with_name("other.gguf"))
    assert content_hash(tmp_path / "in") == found and len(found) == 64
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert content_hash(tmp_path / "in") != found


def test_a_checkpoint_without_weights_is_named_as_such(tmp_path: Path) -> None:
    """Of a run that learns beside frozen weights; nothing can be trained from it alone."""
    (tmp_path / "keyhole_state.json").write_text("{}")
    with pytest.raises(UserError, match="is a checkpoint without weights"):
        weight_files(tmp_path)
    (tmp_path / "keyhole_state.json").unlink()
    with pytest.raises(UserError, match="has no weights"):
        weight_files(tmp_path)


INDEXES: list[tuple[Any, str]] = [
    ({}, "cannot be read: its weight_map must name a file for every tensor"),
    ({"weight_map": {}}, "its weight_map must name a file"),
    ({"weight_map": {"a": 3}}, "its weight_map must name a file"),
    ([], "cannot be read.*holds a list"),
    ("[" * 200_000, "cannot be read: its brackets are nested too deeply"),
    ({"weight_map": {"a": "../../etc/passwd"}}, "names '../../etc/passwd'.*without a path"),
    ({"weight_map": {"a": ".."}}, "names '..'"),
    (
        {"weight_map": {"a": "b.safetensors", "c": "d.safetensors"}},
        r"names b.safetensors, which is missing \(2 files\)",
    ),
    ({"weight_map": {"a": "model.safetensors"}}, "model.safetensors has no a, though the index says so"),
    ({"weight_map": {"a": "config.json"}}, "holds two models, model.safetensors and the files that .*index.json names"),
]


@pytest.mark.parametrize(("index", "says"), INDEXES)
def test_an_index_that_cannot_be_true_is_named(index: Any, says: str, tiny_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model, tmp_path / "m")
    (directory / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(UserError, match=says):
        stored_tensors(directory)


def test_which_files_are_weights_and_which_are_the_users(tiny_model: Path, tmp_path: Path) -> None:
    """Those that are called as a save calls them, and those of the index, if they are there and beside it."""
    assert has_weights(tiny_model) and not has_weights(tmp_path) and not is_pickled(tmp_path)
    names = ["model.safetensors", "model-00001-of-00002.safetensors", "own.safetensors", "mine.safetensors", "x.txt"]
    for name in names:
        (tmp_path / name).touch()
    assert stored_weights(tmp_path) == set(names[:2])
    listed = dict(enumerate(["own.safetensors", "x.txt", "../y.safetensors", "no.safetensors"]))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": listed}))
    assert stored_weights(tmp_path) == set(names[:3])
    (tmp_path / "pytorch_model.bin").touch()
    assert not is_pickled(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).unlink()
    assert is_pickled(tmp_path) and has_weights(tmp_path)


def test_tensors_in_memory_have_the_hash_of_their_file(tiny_model: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    assert tensors_hash(tensors.items()) == content_hash(tiny_model)
    assert {name: one.shape for name, one in stored_tensors(tiny_model).items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([torch.ones(2)], "it is no table of tensors by name"),
        ({1: torch.ones(2)}, "it is no table of tensors by name"),
        ({"w": torch.ones(2).to_sparse()}, "w is no plain tensor"),
        ({"w": 3}, "w is no plain tensor"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_something_else_is_refused(content: Any, says: str, zipped: bool, tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.arange(3)}, file, _use_new_zipfile_serialization=zipped)
    assert open_shard(file).get_tensor("w").tolist() == [0, 1, 2] and not stored_tensors(tmp_path)["w"].is_number
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=says):
        open_shard(file)
