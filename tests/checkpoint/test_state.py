"""Checkpoints: written whole, verified to the byte."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keyhole
from keyhole.checkpoint import snapshot
from keyhole.checkpoint import state as state_file
from keyhole.checkpoint.state import FORMAT, STATE, TENSORS, Damaged, State, verify
from keyhole.checkpoint.writer import method_state
from keyhole.errors import UserError
from tests.checkpoint import written

SCALARS = {"step_count": 7, "scale": 0.1, "list": [1, 2]}
OTHER = {"loader": {"epoch": 1, "position": 5}, "config": {"seed": 3}, "versions": {"torch": "2"}}


def write(path: Path, model: Any) -> dict[str, Any]:
    saved = SCALARS | {"w/exp_avg": torch.randn(4, 5), "w/step": torch.tensor(3.0)}
    written.write(path, model, saved, State(12, **OTHER))
    return saved


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "checkpoint-12"
    write(path, keyhole.load(tiny_model, device="cpu"))
    return path


def test_everything_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-12"
    saved = write(path, keyhole.load(tiny_model, device="cpu"))
    found = verify(path)
    assert (found.step, found.loader, found.config) == (12, OTHER["loader"], OTHER["config"])
    read = dict(method_state(path, found))
    assert {name: value for name, value in read.items() if name in SCALARS} == SCALARS
    assert all(torch.equal(read[name], saved[name]) for name in ("w/exp_avg", "w/step"))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-12"]


def test_a_failed_write_leaves_the_old_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = keyhole.load(tiny_model, device="cpu")
    path = tmp_path / "checkpoint-12"
    write(path, model)
    before = verify(path)

    def fail(file: int, data: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "write_at", fail)
    with pytest.raises(OSError):
        write(path, model)
    assert verify(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-12"]


@pytest.mark.parametrize("name", ["model.safetensors", TENSORS, STATE, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("harm", ["missing", "truncated", "empty"])
def test_missing_and_torn_files_are_named(whole: Path, tmp_path: Path, name: str, harm: str) -> None:
    path = shutil.copytree(whole, tmp_path / "checkpoint-12")
    content = (path / name).read_bytes()
    if harm == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes(content[: len(content) // 2] if harm == "truncated" else b"")
    with pytest.raises(Damaged, match=name):
        verify(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_never_loaded(whole: Path, data: st.DataObject) -> None:
    before = verify(whole)
    file = data.draw(st.sampled_from(sorted(whole.iterdir())))
    content = bytearray(file.read_bytes())
    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    original = bytes(content)
    content[place] ^= 1 << bit
    try:
        file.write_bytes(content)
        try:
            assert verify(whole) == before and file.name == STATE
        except Damaged as fault:
            assert file.name in str(fault)
    finally:
        file.write_bytes(original)


def edited(whole: Path, to: Path, **changes: Any) -> Path:
    """A copy whose state says something else, with a right checksum."""
    path = shutil.copytree(whole, to / "checkpoint-12")
    content = json.loads((path / STATE).read_text())
    del content["crc32"]
    (path / STATE).write_text(state_file.dump(content | changes))
    return path


UNTRUE = {
    "step": [10**18, -1, 1.0, "12", None, True, 11],
    "files": [{}, [], {"config.json": {"bytes": 1, "crc32": "0"}}, {"../x": {"bytes": 1, "crc32": "0"}}],
    "loader": [[], None],
    "method": ["x"],
    "config": [1],
    "run": [1],
    "base": [[]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in UNTRUE for value in UNTRUE[name]])
def test_a_state_that_no_run_wrote_is_refused(whole: Path, tmp_path: Path, name: str, value: Any) -> None:
    """Its checksum is right, what it says is not: nothing is loaded that was not verified."""
    with pytest.raises(Damaged, match=STATE):
        verify(edited(whole, tmp_path, **{name: value}))


def test_weights_that_the_state_does_not_list_are_refused(whole: Path, tmp_path: Path) -> None:
    """An index beside a verified file would be loaded instead of it."""
    path = shutil.copytree(whole, tmp_path / "checkpoint-12")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other.safetensors"}}')
    with pytest.raises(Damaged, match="files does not list model.safetensors.index.json"):
        verify(path)


@pytest.mark.parametrize("version", [1, FORMAT + 1, None])
def test_another_version_is_refused_and_no_damage(whole: Path, tmp_path: Path, version: int | None) -> None:
    """So that no older checkpoint is used instead."""
    with pytest.raises(UserError, match=f"another version of keyhole.*format {version}; this one reads"):
        verify(edited(whole, tmp_path, format=version))


def test_files_that_are_no_files_are_refused(whole: Path, tmp_path: Path) -> None:
    path = shutil.copytree(whole, tmp_path / "checkpoint-12")
    for harm in (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.write_text("[" * 10**6)):
        (path / STATE).unlink()
        harm(path / STATE)
        with pytest.raises(Damaged, match=STATE):
            verify(path)


@pytest.fixture(scope="module")
def in_shards(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "checkpoint-12"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keyhole.model.weights.save.SHARD_BYTES", 50_000)
        write(path, keyhole.load(tiny_model, device="cpu"))
    return path


@pytest.mark.parametrize("harm", ["missing shard", "stale index", "stale shard", "swapped shards", "extra zeros"])
def test_shards_that_do_not_belong_together(in_shards: Path, tmp_path: Path, harm: str) -> None:
    path = shutil.copytree(in_shards, tmp_path / "checkpoint-12")
    first, second = sorted(path.glob("model-*.safetensors"))[:2]
    index = path / "model.safetensors.index.json"
    if harm == "missing shard":
        first.unlink()
    elif harm == "stale index":
        index.write_text(index.read_text().replace(first.name, second.name))
    elif harm == "stale shard":
        content = bytearray(first.read_bytes())
        content[-4:] = b"\0\0\0\0"
        first.write_bytes(content)
    elif harm == "swapped shards":
        a, b = first.read_bytes(), second.read_bytes()
        first.write_bytes(b)
        second.write_bytes(a)
    else:
        first.write_bytes(first.read_bytes() + bytes(8))
    with pytest.raises(Damaged, match="model.*safetensors"):
        verify(path)
