"""Models as Hugging Face directories."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import keyhole
from keyhole.errors import UserError
from keyhole.model.weights import save as hf


@pytest.fixture
def model(tiny_model: Path) -> keyhole.Model:
    return keyhole.load(tiny_model, device="cpu")


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_saving_beside_other_files_replaces_only_the_model(
    model: keyhole.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(hf, "SHARD_BYTES", 50_000)
        model.save_pretrained(tmp_path)
    assert hf.INDEX in names(tmp_path) and len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model.save_pretrained(tmp_path)
    assert hf.INDEX not in names(tmp_path) and list(tmp_path.glob("model*")) == [tmp_path / "model.safetensors"]
    assert "run" in names(tmp_path) and not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_file_where_the_model_should_go_is_kept(model: keyhole.Model, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("mine")
    for path in (notes, notes / "model", notes / "deep" / "model"):
        with pytest.raises(UserError, match="notes is a file.*choose a directory"):
            model.save_pretrained(path)
    assert notes.read_text() == "mine" and list(tmp_path.iterdir()) == [notes]
    with pytest.raises(UserError, match="save_pretrained: cannot write to /proc/model: "):
        model.save_pretrained("/proc/model")


def test_saving_keeps_the_users_own_weights(model: keyhole.Model, tmp_path: Path) -> None:
    old = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "weights-a.safetensors"]
    mine = ["model_ema.safetensors", "model-before.safetensors", "model-1-of-2.safetensors", "other.safetensors"]
    out = tmp_path / "out"
    out.mkdir()
    for name in (*old, *mine, "../outside.safetensors"):
        (out / name).write_bytes(b"precious")
    listed = {"a": "weights-a.safetensors", "b": "../outside.safetensors", "c": old[0]}
    (out / hf.INDEX).write_text(json.dumps({"weight_map": listed}))
    model.save_pretrained(out)
    assert all((out / name).read_bytes() == b"precious" for name in (*mine, "../outside.safetensors"))
    assert not [name for name in old if (out / name).exists()]
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 32


def test_a_mount_point_can_be_saved_to(model: keyhole.Model, small_disk: Callable) -> None:
    """All renames stay on the file system of the target, which is another one than that of its parent."""
    path = small_disk(8)
    model.save_pretrained(path)
    model.save_pretrained(path)
    assert AutoModelForCausalLM.from_pretrained(path) and not [name for name in names(path) if name.startswith(".")]


ONE = {"config.json", "model.safetensors", "tokenizer.json"}
TWO = {"config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", hf.INDEX, "vocab.json"}


@pytest.mark.parametrize("new", [ONE, TWO])
@pytest.mark.parametrize("old", [ONE, TWO])
def test_a_crash_at_any_rename_leaves_no_mixture(
    old: set[str], new: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_of_two = {name: name for name in TWO if name.startswith("model-")}
    for die_at in range(12):
        path, temporary = tmp_path / f"{die_at}", tmp_path / f"{die_at}.new"
        for where, files, text in ((path, old, "old"), (temporary, new, "new")):
            where.mkdir()
            for name in files:
                (where / name).write_text(json.dumps({"weight_map": map_of_two}) if name == hf.INDEX else text)
        done: list[int] = []
        real, unlink = os.replace, Path.unlink

        def dies(act: Callable, done: list[int] = done, die_at: int = die_at) -> Callable:
            def acts(*args: Path, **options: bool) -> None:
                if len(done) == die_at:
                    raise KeyboardInterrupt
                done.append(1)
                act(*args, **options)

            return acts

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", dies(real))
            patch.setattr(Path, "unlink", dies(unlink))
            hf.move_into_place(temporary, path)
        weights = {"model.safetensors"} if (path / "model.safetensors").exists() else set(map_of_two)
        needed = {"config.json", *weights} | (set() if len(weights) == 1 else {hf.INDEX})
        if needed <= names(path):
            assert len({(path / name).read_text() for name in needed - {hf.INDEX}}) == 1, die_at


@pytest.mark.parametrize("limit_bytes", [10**9, 50_000])
def test_the_files_that_transformers_would_write(
    model: keyhole.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(hf, "SHARD_BYTES", limit_bytes)
    assert hf.names_on_disk(model).keys() == dict(model.named_tensors()).keys()
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    hf.write_files(model, tmp_path / "ours")
    monkeypatch.setattr(hf, "names_on_disk", lambda model: None)
    hf.write_files(model, tmp_path / "theirs")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    small = {name for name in names(theirs) if not name.startswith("model")}
    assert small == {name for name in names(ours) if not name.startswith("model")}
    assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in small)
    mine, yours = ({k: v for f in p.glob("*.safetensors") for k, v in load_file(f).items()} for p in (ours, theirs))
    assert mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)
    assert all(torch.equal(mine[name], tensor) for name, tensor in model.named_tensors())
    assert ((ours / hf.INDEX).exists()) == (limit_bytes < 10**6)
    AutoModelForCausalLM.from_pretrained(ours)
    assert AutoTokenizer.from_pretrained(ours).chat_template == model.tokenizer.chat_template


def test_publish_links_weights_and_copies_the_rest(model: keyhole.Model, tmp_path: Path) -> None:
    checkpoint, out = tmp_path / "out" / "checkpoint-3", tmp_path / "out"
    model.save_pretrained(checkpoint)
    own = names(checkpoint)
    (checkpoint / "secret.json").write_text("{}")
    hf.publish(checkpoint, out, own)
    assert names(out) == own | {"checkpoint-3"}
    assert (out / "model.safetensors").samefile(checkpoint / "model.safetensors")
    assert not (out / "config.json").samefile(checkpoint / "config.json")
    hf.publish(checkpoint, out, own)  # again, over itself
    AutoModelForCausalLM.from_pretrained(out)


def test_files_of_the_user_in_a_folder_of_the_model_stay(model: keyhole.Model, tmp_path: Path) -> None:
    """Only files of the same name are replaced, also in folders; a link in the place of a folder is not followed."""
    checkpoint, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    model.save_pretrained(checkpoint)
    for folder in ("adapter", "templates"):
        (checkpoint / folder).mkdir()
        (checkpoint / folder / "file").write_text("new")
    own = names(checkpoint) - {"adapter", "templates"} | {"adapter/file", "templates/file"}
    (tmp_path / "out" / "adapter").mkdir(parents=True)
    elsewhere.mkdir()
    for path in (tmp_path / "out" / "adapter" / "file", tmp_path / "out" / "adapter" / "mine", elsewhere / "file"):
        path.write_text("old")
    (tmp_path / "out" / "templates").symlink_to(elsewhere)
    hf.publish(checkpoint, tmp_path / "out", own)
    found = {name: (tmp_path / "out" / name).read_text() for name in ("adapter/file", "adapter/mine", "templates/file")}
    assert found == {"adapter/file": "new", "adapter/mine": "old", "templates/file": "new"}
    assert (elsewhere / "file").read_text() == "old"


def test_end_tokens_join_the_generation_config(model: keyhole.Model, tmp_path: Path) -> None:
    end = model.tokenizer.eos_token_id
    assert hf.add_end_tokens(model.module, [end]) == [end]
    assert hf.add_end_tokens(model.module, [end, 3, 3]) == [end, 3]
    model.save_pretrained(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [end, 3]


def test_a_generation_config_that_transformers_refuses_is_mended(model: keyhole.Model, tmp_path: Path) -> None:
    """Training is not lost to settings without effect, which transformers does not write; a greedy model stays one."""
    for name, value in {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "length_penalty": 0.7}.items():
        setattr(model.module.generation_config, name, value)
    model.save_pretrained(tmp_path / "out")
    assert not AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.do_sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_finds_one_bad_element(dtype: torch.dtype, value: float) -> None:
    bad = torch.randn(100, 33).to(dtype)
    bad[57, 4] = value
    tensors = [("empty", torch.empty(0)), ("good", torch.ones(5, dtype=dtype)), ("bad", bad)]
    assert hf.first_bad_tensor(tensors) == "bad"
    assert hf.first_bad_tensor(tensors[:2]) is None
