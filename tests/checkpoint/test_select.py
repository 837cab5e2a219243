"""Which checkpoint a run goes on from, which are deleted, and what stays of them."""

import json
import os
import shutil
from pathlib import Path

import pytest

import keyhole
from keyhole.checkpoint import select
from keyhole.checkpoint.state import FORMAT, STATE, dump, listed_files, verify
from keyhole.errors import UserError
from keyhole.training import rundir
from keyhole.training.rundir import locked
from tests.checkpoint.written import write


@pytest.fixture
def root(tiny_model: Path, tmp_path: Path) -> Path:
    """Three whole checkpoints, 4, 8 and 12."""
    model = keyhole.load(tiny_model, device="cpu")
    for step in (4, 8, 12):
        write(tmp_path / f"checkpoint-{step}", model)
    return tmp_path


def names(root: Path) -> list[str]:
    return [path.name for path in select.checkpoints(root)]


def everything(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def harm(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"half")


def test_newest_by_number(root: Path) -> None:
    """12 is newer than 8, though not in the alphabet; other names do not count."""
    (root / "checkpoint-best").mkdir()
    (root / "checkpoint-99").write_text("a file")
    assert names(root) == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]
    assert select.newest(root).path == root / "checkpoint-12"
    assert select.newest(root / "nowhere").path is None


@pytest.mark.parametrize("word", select.LAST)
def test_damaged_ones_are_passed_over_and_named(root: Path, word: str) -> None:
    harm(root / "checkpoint-12")
    (root / "checkpoint-8" / "config.json").unlink()
    choice = select.choose(word, root)
    assert choice.path == root / "checkpoint-4" and choice.state.step == 4
    assert "config.json is missing" in choice.damaged[root / "checkpoint-8"]
    for path in choice.damaged:
        select.set_aside(path, "damaged")
    assert names(root) == ["checkpoint-4"]
    assert (root / "checkpoint-12.damaged" / "model.safetensors").read_bytes() == b"half"


def test_only_damaged_ones_is_an_error(root: Path) -> None:
    """A run is never started over in silence because its checkpoints are broken."""
    for path in select.checkpoints(root):
        harm(path)
    with pytest.raises(UserError, match="every checkpoint(.|\n)*checkpoint-12: model.safetensors has 4 bytes"):
        select.choose("last", root)


def test_a_path(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("new")
    assert select.choose(str(root / "checkpoint-8"), elsewhere).state.step == 8
    assert select.choose(str(root), elsewhere).state.step == 12
    with pytest.raises(UserError, match="is not a directory"):
        select.choose(str(root / "checkpoint-7"), root)
    harm(root / "checkpoint-8")
    with pytest.raises(UserError, match="checkpoint-8 cannot be used: model.safetensors"):
        select.choose(str(root / "checkpoint-8"), elsewhere)


def test_no_second_history_in_one_directory(root: Path) -> None:
    with pytest.raises(UserError, match="checkpoint-12 too"):
        select.choose(str(root / "checkpoint-4"), root)
    assert select.choose(str(root / "checkpoint-12"), root).state.step == 12


@pytest.mark.parametrize(("keep", "left"), [(None, [4, 8, 12]), (5, [4, 8, 12]), (2, [8, 12]), (1, [12]), (0, [12])])
def test_prune_keeps_the_newest(root: Path, keep: int | None, left: list[int]) -> None:
    select.prune(root, keep, up_to=12)
    assert everything(root) == sorted(f"checkpoint-{step}" for step in left)


def test_a_link_to_a_checkpoint_does_not_stand_for_it(root: Path) -> None:
    """A user's link with the highest number: the checkpoint behind it is still the newest, and stays. So does what is
    behind a link in the place of an old one."""
    (root / "checkpoint-99").symlink_to(root / "checkpoint-12")
    os.replace(root / "checkpoint-4", root / "moved")
    (root / "checkpoint-4").symlink_to(root / "moved")
    select.prune(root, 1, up_to=99)
    assert everything(root) == ["checkpoint-12", "checkpoint-4", "checkpoint-99", "moved"]
    verify(root / "moved")


def test_the_rest_of_a_deletion_is_not_called_a_strangers(root: Path) -> None:
    """A run that was killed while it deleted a checkpoint finishes that; a directory without any state is named."""
    (root / "checkpoint-12" / STATE).rename(root / "checkpoint-12" / select.DELETED)
    (root / "checkpoint-16").mkdir()
    assert select.newest(root).strange == [root / "checkpoint-16"]
    (root / "checkpoint-8" / STATE).unlink()  # nobody knows any more whose it is
    choice = select.newest(root)
    assert choice.path == root / "checkpoint-4" and root / "checkpoint-8" in choice.strange and not choice.damaged


def test_a_directory_of_the_user_that_is_called_like_a_checkpoint_is_not_deleted(root: Path) -> None:
    """It has no state, so no run wrote it; it does not count among those that are kept either."""
    (root / "checkpoint-1").mkdir()
    (root / "checkpoint-1" / "notes.txt").write_text("mine")
    select.prune(root, 2, up_to=12)
    assert names(root) == ["checkpoint-8", "checkpoint-12"]
    assert (root / "checkpoint-1" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoint-50", "checkpoint-６", "checkpoint-" + "9" * 26, "checkpoint-013"])
def test_a_directory_of_the_user_is_not_resumed_from(root: Path, name: str) -> None:
    """It is neither damaged nor renamed; it is named if it looks newer than the one that is chosen."""
    for place in (name, "checkpoint-3"):
        (root / place).mkdir()
        (root / place / "trainer_state.json").write_text("{}")
    choice = select.choose("last", root)
    assert choice.path == root / "checkpoint-12" and not choice.damaged
    assert choice.strange == ([root / name] if name == "checkpoint-50" else [])
    assert select.choose(str(root / "checkpoint-12"), root).path == choice.path, "no second history"


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(root: Path) -> None:
    """It is whole, and this version cannot read it: going on from an older one would lose its steps."""
    path = root / "checkpoint-12" / STATE
    content = json.loads(path.read_text())
    del content["crc32"]
    path.write_text(dump(content | {"format": FORMAT + 1} | {"versions": {"keyhole": "9.0"}}))
    for word in ("last", str(path.parent)):
        with pytest.raises(UserError, match=r"checkpoint-12 was written by another version of keyhole \(9\.0"):
            select.choose(word, root)


# -- files of the user -----------------------------------------------------------------------------------------------

MINE = ("eval.json", "gguf/q4.gguf")


@pytest.fixture
def model(tiny_model: Path) -> keyhole.Model:
    return keyhole.load(tiny_model, device="cpu")


@pytest.fixture
def held(model: keyhole.Model, tmp_path: Path) -> Path:
    """Checkpoints 2 and 4; the user has put files into the first."""
    open_run(tmp_path)
    for step in (2, 4):
        write(tmp_path / f"checkpoint-{step}", model)
    for name in MINE:
        (tmp_path / "checkpoint-2" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "checkpoint-2" / name).write_text("mine")
    return tmp_path


def open_run(root: Path) -> None:
    found = rundir.RunDir(root)
    with locked(found.lock) as lock:
        lock.take()
        rundir.open_run(found, "", {}, lock, None)


def files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir())


def test_files_of_the_user_stay_where_they_are(held: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        select.prune(held, 1, 4, said.append)
        assert files(held / "checkpoint-2") == list(MINE)
    assert len(said) == 1 and "checkpoint-2 is deleted, except for" in said[0] and "eval.json, gguf/q4.gguf" in said[0]
    choice = select.newest(held)
    assert choice.path == held / "checkpoint-4" and not choice.damaged and not choice.strange
    verify(choice.path)


def test_a_killed_deletion_is_finished_by_the_next_run(
    held: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    real, left = os.unlink, 0

    def dies(name: Path) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        real(name)

    for done in range(len(listed_files(held / "checkpoint-2" / STATE)) + 1):
        here = shutil.copytree(held, tmp_path_factory.mktemp("copy") / "out")
        path, left = here / "checkpoint-2", done
        select.begin_deletion(path)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "unlink", dies)
            select.finish_deletion(path)
        choice = select.newest(here)
        assert choice.path == here / "checkpoint-4" and not choice.damaged and set(MINE) < set(files(path))
        open_run(here)
        assert files(path) == list(MINE), done


def test_what_has_the_name_of_a_new_checkpoint_gets_another_one(held: Path, model: keyhole.Model) -> None:
    """An older checkpoint, with the files of the user in it; a directory, a link or a file that was none at all."""
    (held / "checkpoint-6.kept").mkdir()
    (held / "checkpoint-6").mkdir()
    (held / "checkpoint-7").symlink_to(held / "checkpoint-6")
    (held / "checkpoint-8").write_text("mine")
    for step, name in (
        (2, "checkpoint-2.kept"),
        (6, "checkpoint-6.kept1"),
        (7, "checkpoint-7.kept"),
        (8, "checkpoint-8.kept"),
    ):
        lines = write(held / f"checkpoint-{step}", model)
        assert f"it is called {name} now" in lines[0] and verify(held / f"checkpoint-{step}").step == step
    assert set(MINE) < set(files(held / "checkpoint-2.kept")) and (held / "checkpoint-7.kept").is_symlink()
    assert (held / "checkpoint-8.kept").read_text() == "mine"
    assert not [path for path in held.iterdir() if path.name.startswith(".")]


def test_a_checkpoint_whose_state_is_unreadable_is_set_aside(held: Path) -> None:
    (held / "checkpoint-2" / STATE).write_text("{")
    before, said = files(held / "checkpoint-2"), []
    select.prune(held, 1, 4, said.append)
    assert files(held / "checkpoint-2.damaged") == before and not (held / "checkpoint-2").exists()
    assert len(said) == 1 and "it is now checkpoint-2.damaged" in said[0]
