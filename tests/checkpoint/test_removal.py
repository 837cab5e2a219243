"""Deleting and replacing checkpoints that hold files of the user."""

import os
import shutil
from pathlib import Path

import pytest

import keyhole
from keyhole.checkpoint import removal, select
from keyhole.checkpoint.files import About, save_checkpoint
from keyhole.checkpoint.state import STATE, listed_files, verify
from keyhole.training import rundir
from keyhole.training.lock import locked

MINE = ("eval.json", "gguf/q4.gguf")


@pytest.fixture
def model(tiny_model: Path) -> keyhole.Model:
    return keyhole.load(tiny_model, device="cpu")


@pytest.fixture
def root(model: keyhole.Model, tmp_path: Path) -> Path:
    """Checkpoints 2 and 4; the user has put files into the first."""
    open_run(tmp_path)
    for step in (2, 4):
        save_checkpoint(tmp_path / f"checkpoint-{step}", model, {}, About(step, {}, {}, {}))
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


def test_files_of_the_user_stay_where_they_are(root: Path) -> None:
    """All other files go; what is left is no checkpoint, and is not spoken of again."""
    said: list[str] = []
    for _ in range(2):
        select.prune(root, 1, 4, said.append).join()
        assert files(root / "checkpoint-2") == list(MINE)
    assert len(said) == 1 and "checkpoint-2 is deleted, except for" in said[0] and "eval.json, gguf/q4.gguf" in said[0]
    choice = select.newest(root)
    assert choice.path == root / "checkpoint-4" and not choice.damaged and not choice.strange
    verify(choice.path)


def test_a_killed_deletion_is_finished_by_the_next_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After any of its calls: what is left is no checkpoint, and the user's files stay, then and later."""
    real, left = os.unlink, 0

    def dies(name: Path) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        real(name)

    for done in range(len(listed_files(root / "checkpoint-2" / STATE)) + 1):
        here = shutil.copytree(root, tmp_path_factory.mktemp("copy") / "out")
        path, left = here / "checkpoint-2", done
        removal.begin(path)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "unlink", dies)
            removal.finish(path)
        choice = select.newest(here)
        assert choice.path == here / "checkpoint-4" and not choice.damaged and set(MINE) < set(files(path))
        open_run(here)
        assert files(path) == list(MINE), done


def test_a_replaced_checkpoint_leaves_the_files_of_the_user(root: Path, model: keyhole.Model) -> None:
    """They get a name of their own; so does a directory, a link or a file that was no checkpoint at all."""
    lines = save_checkpoint(root / "checkpoint-2", model, {}, About(2, {}, {}, {}))
    assert "did not write (eval.json, gguf/q4.gguf) are in checkpoint-2.kept now" in lines[0]
    assert files(root / "checkpoint-2.kept") == list(MINE) and verify(root / "checkpoint-2").step == 2
    assert save_checkpoint(root / "checkpoint-2", model, {}, About(2, {}, {}, {})) == []
    os.replace(root / "checkpoint-2.kept", root / "checkpoint-6")
    (root / "checkpoint-7").symlink_to(root / "checkpoint-6")
    (root / "checkpoint-8").write_text("mine")
    (root / "checkpoint-6.kept").mkdir()
    for step, kept in ((6, "checkpoint-6.kept1"), (7, "checkpoint-7.kept"), (8, "checkpoint-8.kept")):
        lines = save_checkpoint(root / f"checkpoint-{step}", model, {}, About(step, {}, {}, {}))
        assert f"is called {kept} now" in lines[0] and verify(root / f"checkpoint-{step}").step == step
    assert files(root / "checkpoint-6.kept1") == list(MINE)
    assert (root / "checkpoint-7.kept").is_symlink() and (root / "checkpoint-8.kept").read_text() == "mine"
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_links_are_not_followed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A checkpoint that was moved to another disk stays there, and so does its link."""
    elsewhere = tmp_path_factory.mktemp("disk") / "moved"
    os.replace(root / "checkpoint-2", elsewhere)
    (root / "checkpoint-2").symlink_to(elsewhere)
    before = files(elsewhere)
    select.prune(root, 1, 4).join()
    assert (root / "checkpoint-2").is_symlink() and files(elsewhere) == before


def test_a_checkpoint_whose_state_is_unreadable_is_set_aside(root: Path) -> None:
    """Which files are its own is unknown, so none is deleted."""
    (root / "checkpoint-2" / STATE).write_text("{")
    before, said = files(root / "checkpoint-2"), []
    select.prune(root, 1, 4, said.append).join()
    assert files(root / "checkpoint-2.damaged") == before and not (root / "checkpoint-2").exists()
    assert len(said) == 1 and "it is now checkpoint-2.damaged" in said[0]
