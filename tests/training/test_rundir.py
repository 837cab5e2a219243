"""The output directory."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keyhole.errors import UserError
from keyhole.training import rundir
from keyhole.training.rundir import Lock, locked

HOLDER = """
import sys, time
from pathlib import Path
from keyhole.training.rundir import Lock
Lock(Path(sys.argv[1])).take()
print("held", flush=True)
time.sleep(60)
"""


def open_run(found: rundir.RunDir) -> None:
    with locked(found.lock) as lock:
        lock.take()
        rundir.open_run(found, "method: zo\n", {"versions": {}}, lock, "a run's id")


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_new_and_empty_directories_are_fine(tmp_path: Path) -> None:
    """Looking creates nothing; opening writes the marker, the settings and the environment."""
    root = tmp_path / "a" / "b"
    found = rundir.inspect(str(root), resume=False)
    assert not root.exists()
    open_run(found)
    assert sorted(contents(root)) == ["run/config.yaml", "run/env.json", "run/keyhole.json", "run/lock"]
    rundir.inspect(str(root), resume=False)  # it saved nothing yet, so it may start over


@pytest.mark.parametrize("resume", [False, True])
def test_strange_directories_are_refused(tmp_path: Path, resume: bool) -> None:
    """A directory with somebody else's files, or a file, is refused and left as it is."""
    (tmp_path / "chapter.tex").write_text("precious")
    with pytest.raises(UserError, match=r"output_dir: .* keyhole did not write \(such as chapter.tex\)"):
        rundir.inspect(str(tmp_path), resume)
    with pytest.raises(UserError, match="is a file"):
        rundir.inspect(str(tmp_path / "chapter.tex"), resume)
    assert contents(tmp_path) == {"chapter.tex": b"precious"}


@pytest.mark.parametrize(
    ("name", "says"), [("checkpoint-4/keyhole_state.json", "--resume"), ("model.safetensors", "; choose another")]
)
def test_a_run_is_not_written_over(tmp_path: Path, name: str, says: str) -> None:
    """Our own directory with something in it needs --resume, or another one where nothing leads on. A directory of the
    user that is called like a checkpoint is none."""
    open_run(rundir.inspect(str(tmp_path), resume=False))
    (tmp_path / "checkpoint-50").mkdir()
    (tmp_path / "checkpoint-50" / "trainer_state.json").write_text("{}")
    assert rundir.inspect(str(tmp_path), resume=False).holds is None
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match=f"holds a run already .*{says}"):
        rundir.inspect(str(tmp_path), resume=False)
    assert rundir.inspect(str(tmp_path), resume=True).is_ours


def test_a_killed_start_does_not_lock_the_directory(tmp_path: Path) -> None:
    """A process killed before the marker was in place leaves nothing that counts as strange."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".keyhole.json.tmp").write_text("{")
    assert not rundir.inspect(str(tmp_path), resume=False).is_ours


def test_only_our_own_leftovers_are_swept_away(tmp_path: Path) -> None:
    """Half-written checkpoints of dead processes go when a run opens the directory; names that look like ours stay."""
    found = rundir.inspect(str(tmp_path), resume=False)
    open_run(found)
    mine = [".notes.saving-2024", ".checkpoint-3.saving-mine", ".checkpoint-1.old-99", ".model.saving-"]
    for name in (*mine, ".checkpoint-3.saving-123"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("x")
    open_run(found)
    assert {path.name for path in tmp_path.iterdir()} == {"run", *mine}


@pytest.mark.parametrize("name", ["lock", "journal", "metrics.jsonl", "keyhole.json", ".", "pipe", "directory"])
def test_links_out_of_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    """A link in run/, or run/ itself, is named and not written through; so is a directory with the name of a file."""
    victim, root = tmp_path / "victim", tmp_path / "out"
    root.mkdir()
    if name == "pipe":  # nothing reads from it
        victim.write_text("precious")
        (root / "run").mkdir()
        os.mkfifo(root / "run" / "metrics.jsonl")
    elif name == "directory":
        victim.write_text("precious")
        (root / "run" / "env.json").mkdir(parents=True)
    elif name == ".":
        victim.mkdir()
        (root / "run").symlink_to(victim)
    else:
        victim.write_text("precious")
        (root / "run").mkdir()
        (root / "run" / "keyhole.json").write_text("{}")
        (root / "run" / name).unlink(missing_ok=True)
        (root / "run" / name).symlink_to(victim)
    for resume in (False, True):
        with pytest.raises(UserError, match="output_dir: .* is a link, a pipe, a device or a directory"):
            rundir.inspect(str(root), resume)
    assert list(victim.iterdir()) == [] if name == "." else victim.read_text() == "precious"


@pytest.mark.parametrize("temporary", [".keyhole.json.tmp", ".config.yaml.tmp", ".env.json.tmp"])
def test_temporaries_are_created_and_never_followed(tmp_path: Path, temporary: str) -> None:
    """Somebody's link under the name of a temporary is replaced; what it points to stays as it is."""
    victim, found = tmp_path / "victim", rundir.RunDir(tmp_path / "out")
    victim.write_text("precious")
    found.run.mkdir(parents=True)
    with locked(found.lock) as lock:
        lock.take()
        (found.run / temporary).symlink_to(victim)
        rundir.open_run(found, "method: zo\n", {}, lock, None)
    assert victim.read_text() == "precious" and (found.run / "config.yaml").read_text() == "method: zo\n"


@pytest.mark.parametrize("text", ["[", '"text"', "[" * 10**5, "1" * 10**4])
def test_a_marker_that_was_edited_is_named(tmp_path: Path, text: str) -> None:
    """The marker holds the run's id: without it nothing is known of what lies here."""
    open_run(rundir.RunDir(tmp_path))
    (tmp_path / "run" / "keyhole.json").write_text(text)
    with pytest.raises(UserError, match="keyhole.json cannot be read"):
        rundir.RunDir(tmp_path).place()


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "run/" * 2000, "file/out", "link", "link/out", "checkpoint-4/a"])
def test_impossible_places_are_the_users_to_fix(tmp_path: Path, name: str) -> None:
    """Found when the directory is inspected, before data and model are read: a name, a file above, a link that leads
    nowhere, a checkpoint of another run, which is deleted around it."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "keyhole_state.json").write_text("{}")
    why = {"file": "is a file", "link": "is a link that leads nowhere", "checkpoint-4": "which its run will delete"}
    with pytest.raises(UserError, match=f"output_dir: .* {why.get(name.split('/')[0], 'is not possible')}"):
        rundir.inspect(f"{tmp_path}/{name}", resume=False)
    assert not (tmp_path / "unmounted").exists()


def test_a_read_only_place_is_found_at_once(small_disk: Callable[[int], Path]) -> None:
    """Before data and model are read, and also where the directory is still to be made."""
    root = small_disk(1)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    for path in (root, root / "new" / "out"):
        with pytest.raises(UserError, match="output_dir: .* is not possible: Read-only"):
            rundir.inspect(str(path), resume=False)


def test_the_names_of_a_run_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory that holds a name of the run is flushed: those that were made for it, and their parents."""
    flushed, real = set(), os.fsync

    def fsync(file: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    root = tmp_path.resolve() / "a" / "b"
    open_run(rundir.inspect(str(root), resume=False))
    assert {str(path) for path in (tmp_path.resolve(), root.parent, root, root / "run")} <= flushed


def test_another_process_is_named_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    """While a process holds the lock the message has its number; after kill -9 the lock is free at once."""
    path = tmp_path / "run" / "lock"
    path.parent.mkdir()
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {child.pid} is training into {tmp_path} already"):
            Lock(path).take()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    with locked(path) as lock:
        lock.take()
        lock.take()
        assert path.read_text() == f"{os.getpid()}\n"
        with pytest.raises(UserError, match=f"process {os.getpid()}"):
            Lock(path).take()
    Lock(path).take()


@pytest.mark.parametrize("linked", [os.symlink, os.link])
def test_a_file_of_the_user_is_no_lock(tmp_path: Path, linked: Callable) -> None:
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / "run").mkdir()
    linked(tmp_path / "victim", tmp_path / "run" / "lock")
    with pytest.raises(UserError, match="output_dir: .*lock"):
        Lock(tmp_path / "run" / "lock").take()
    assert (tmp_path / "victim").read_text() == "precious\n"
