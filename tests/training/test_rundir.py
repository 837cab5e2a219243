"""The output directory."""

from pathlib import Path

import pytest

from keyhole.config import TrainConfig, to_yaml
from keyhole.errors import UserError
from keyhole.training import rundir
from keyhole.training.lock import locked


def open_run(found: rundir.RunDir, *about: object) -> None:
    with locked(found.lock) as lock:
        rundir.open_run(found, *about, lock)


def config(root: Path) -> TrainConfig:
    return TrainConfig(model="m", method="zo", train_data="d", output_dir=str(root), max_steps=3)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_new_and_empty_directories_are_fine(tmp_path: Path) -> None:
    """Looking creates nothing; opening writes the marker, the settings and the environment."""
    root = tmp_path / "a" / "b"
    found = rundir.inspect(str(root), resume=False)
    assert not root.exists()
    open_run(found, to_yaml(config(root)), {"versions": {}})
    assert sorted(contents(root)) == ["run/config.yaml", "run/env.json", "run/keyhole.json", "run/lock"]
    rundir.inspect(str(root), resume=False)  # it saved nothing yet, so it may start over


@pytest.mark.parametrize("resume", [False, True])
def test_strange_directories_are_refused(tmp_path: Path, resume: bool) -> None:
    """A directory with somebody else's files, or a file, is refused and left as it is."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    with pytest.raises(UserError, match=r"output_dir: .* keyhole did not write \(such as chapter.tex\)"):
        rundir.inspect(str(tmp_path), resume)
    with pytest.raises(UserError, match="is a file"):
        rundir.inspect(str(tmp_path / "thesis" / "chapter.tex"), resume)
    assert contents(tmp_path) == {"thesis/chapter.tex": b"precious"}


@pytest.mark.parametrize("name", ["checkpoint-4/keyhole_state.json", "model.safetensors"])
def test_a_run_is_not_written_over(tmp_path: Path, name: str) -> None:
    """Our own directory with something in it needs --resume."""
    open_run(rundir.inspect(str(tmp_path), resume=False), to_yaml(config(tmp_path)), {})
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match="--resume"):
        rundir.inspect(str(tmp_path), resume=False)
    assert rundir.inspect(str(tmp_path), resume=True).is_ours


def test_a_killed_start_does_not_lock_the_directory(tmp_path: Path) -> None:
    """A process killed before the marker was in place leaves nothing that counts as strange."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".keyhole.json.tmp").write_text("{")
    assert not rundir.inspect(str(tmp_path), resume=False).is_ours


def test_leftovers_are_swept_away(tmp_path: Path) -> None:
    """Half-written and half-deleted checkpoints of dead processes go when a run opens the directory."""
    found = rundir.inspect(str(tmp_path), resume=False)
    open_run(found, to_yaml(config(tmp_path)), {})
    for name in (".checkpoint-3.saving-123", ".checkpoint-1.old-99"):
        (tmp_path / name).mkdir()
    open_run(found, to_yaml(config(tmp_path)), {})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_unwritable_place_is_the_users_to_fix(tmp_path: Path) -> None:
    """The error names the key and the system's reason."""
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "out"
    with pytest.raises(UserError, match="output_dir"):
        open_run(rundir.RunDir(root), to_yaml(config(root)), {})
