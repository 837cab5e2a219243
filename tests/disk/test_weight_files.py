"""The hash of a directory's weights."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from keyhole.disk.weight_files import content_hash, read_header, weight_files
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
