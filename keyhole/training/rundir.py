"""The output directory: whether a run may write to it, the files in run/, and the lock.

    output_dir/            the trained model, an ordinary Hugging Face directory
      checkpoint-N/        the same plus keyhole_state.json and optimizer.safetensors
      run/keyhole.json     the marker: this directory is ours; the format's version, and the id of the run
      run/config.yaml      every setting of the run      run/env.json   versions and hardware
      run/metrics.jsonl    one line per step             run/log.txt    what was printed
      run/report.html      the run as a page             run/report.json   its contents besides the metrics
      run/journal          zeroth-order: one record per step (checkpoint/journal.py)
      run/lock             held by the process that writes here

Files that keyhole did not write are never overwritten, and an earlier run is not overwritten without --resume.
`inspect` changes nothing; the directory is created (`open_run`) only after data and model have been checked, and is
inspected then under the lock. In run/ only regular files and directories are accepted: through a link a run would
write elsewhere.

The lock is the kernel's (flock), not the file's existence: it ends with the process, however the process dies. The file
contains the process id, for the message, and is not deleted.
"""

import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import keyhole
from keyhole.checkpoint import journal
from keyhole.checkpoint.resume import Place
from keyhole.checkpoint.select import checkpoints, finish_deletion, numbered
from keyhole.checkpoint.state import STATE
from keyhole.disk.files import make_directories, open_regular, read_small, remove, try_place, write_text, writing_to
from keyhole.disk.json_text import json_text
from keyhole.disk.weight_files import stored_weights
from keyhole.errors import UserError

FORMAT = 1
MARKER_BYTES = 2**20
WRITTEN = {"keyhole.json", "config.yaml", "env.json", "metrics.jsonl", "lock"}  # no run begins without these
# Leftovers of a killed process, half-written (names: disk/files.py). Only our own; the lock is held, so no process is
# at them.
LEFTOVER = re.compile(r"\.(checkpoint-[0-9]+|model)\.saving-[0-9]+|\.probe\.tmp")
LOCK_CONTENT = re.compile(rb"[\d\0]{0,20}\n?")


class RunDir:
    def __init__(self, root: Path) -> None:
        self.root, self.run = root, root / "run"
        self.marker, self.metrics, self.log = (self.run / name for name in ("keyhole.json", "metrics.jsonl", "log.txt"))
        self.journal, self.lock = self.run / "journal", self.run / "lock"

    @property
    def is_ours(self) -> bool:
        return self.marker.is_file()

    @property
    def run_id(self) -> str | None:
        """The id in the marker; None if there is none."""
        if not self.is_ours:
            return None
        try:
            found = json.loads(read_small(self.marker, MARKER_BYTES)).get("run")
        except (OSError, ValueError, RecursionError, AttributeError) as error:
            raise UserError(f"output_dir: {self.marker} cannot be read: {error}; {self.way_out()}") from error
        return found if isinstance(found, str) else None

    @property
    def has_steps(self) -> bool:
        """Whether the journal has a record; an unreadable journal counts as having one."""
        try:
            return self.journal.exists() and bool(journal.read(self.journal).records)
        except (OSError, journal.BadJournal):
            return True

    @property
    def holds(self) -> str | None:
        """Which files of a run here must not be overwritten; None if there are none."""
        if own := checkpoints(self.root):
            return own[-1].name
        if self.root.is_dir() and stored_weights(self.root):
            return "a finished model"
        return "a journal of steps" if self.has_steps else None

    def place(self) -> Place:
        return Place(self.root, self.journal, self.run_id, self.holds)

    def way_out(self) -> str:
        """Advice where the run cannot be identified: resume one of its checkpoints into another output_dir."""
        newest = checkpoints(self.root)[-1:]
        other = f"; its newest checkpoint goes on there with --resume {newest[0]}" if newest else ""
        return f"choose a new or empty directory{other}"


class Lock:
    """One process per directory; acquired once, as soon as run/ exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: int | None = None

    def take(self) -> None:
        """Acquires the lock if its directory exists and we do not hold it yet; UserError names the holder."""
        if self.file is not None or not self.path.parent.is_dir():
            return
        with writing_to(self.path):
            file = open_regular(self.path, os.O_RDWR | os.O_CREAT)
            content = os.pread(file, 32, 0)
        if not LOCK_CONTENT.fullmatch(content):
            os.close(file)
            raise UserError(
                f"output_dir: {self.path} is no lock of keyhole, and stays as it is; choose another output_dir"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            holder = content.decode().strip("\0\n") or "unknown"
            raise UserError(
                f"output_dir: process {holder} is training into {self.path.parent.parent} already; wait for it, stop "
                "it, or choose another output_dir (processes train together under torchrun only)"
            ) from None
        except OSError:  # a file system without locks: train without one
            pass
        with suppress(OSError):  # a full disk: the process id is for messages only
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self.file = file


@contextmanager
def locked(path: Path) -> Iterator[Lock]:
    """A lock that is released at the end, also after an error."""
    lock = Lock(path)
    try:
        yield lock
    finally:
        if lock.file is not None:
            os.close(lock.file)


def inspect(output_dir: str, resume: bool, lock: Lock | None = None) -> RunDir:
    """Checks that a run may write here; otherwise UserError says what to change. lock: is taken, unless the run is
    refused."""
    found = RunDir(Path(output_dir))
    check_place(found.root)
    if not os.path.lexists(found.root):
        return found
    with writing_to(found.root):
        _refuse_links(found.run)
        early = {found.lock, found.run / ".keyhole.json.tmp"}  # left by a process that was killed before its marker
        files = (path for path in found.root.rglob("*") if not path.is_dir() and path not in early)
        stranger = None if found.is_ours else next(files, None)
    if stranger is not None:
        what = f"holds files that keyhole did not write (such as {stranger.name})"
        what += f", and run/{found.marker.name} is not there" if checkpoints(found.root) else ""
        raise UserError(f"output_dir: {found.root} {what}; {found.way_out()}")
    if lock is not None and (resume or found.holds is None):  # another run may add to it until it is taken
        lock.take()
    if not resume and found.holds is not None:
        way = "go on from there with --resume, or " if checkpoints(found.root) or found.has_steps else ""
        raise UserError(f"output_dir: {found.root} holds a run already ({found.holds}); {way}choose another output_dir")
    return found


def check_place(root: Path) -> None:
    """Refuses a name that is not possible, and a place where no directory can be made."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(root)
        place = next(place for place in (root, *root.absolute().parents) if os.path.lexists(place))
        if not place.is_dir():
            what = "a link that leads nowhere" if place.is_symlink() else "a file"
            raise UserError(f"output_dir: {place} is {what}; choose a directory")
        if above := [each for each in Path(os.path.abspath(root)).parents if (each / STATE).is_file()]:
            raise UserError(
                f"output_dir: {root} is inside of {above[0]}, a checkpoint, which its run will delete when it is too "
                "old, except for other files; choose another output_dir"
            )
        try_place(root)
    except (OSError, ValueError) as error:  # too long, no permission, read-only, or a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"output_dir: {str(root)[:200]!r} is not possible: {reason}; choose another output_dir"
        ) from error


def _refuse_links(run: Path) -> None:
    """Checks that run/ and its contents are directories and regular files, and the files of a run no directories."""
    for path in [run, *run.iterdir()] if run.is_dir() else [run]:
        regular = not path.is_symlink() and (path.is_file() or (path.is_dir() and path.name not in WRITTEN))
        if os.path.lexists(path) and not regular:
            raise UserError(
                f"output_dir: {path} is a link, a pipe, a device or a directory, where a run writes its own; move it "
                "away, or choose another output_dir"
            )


def open_run(found: RunDir, config_yaml: str, environment: dict[str, Any], lock: Lock, run_id: str | None) -> None:
    """Creates the directory with its marker, deletes what killed processes left, saves settings and environment."""
    with writing_to(found.root):
        make_directories(found.run)
        if lock.file is None:  # made just now, by this process or by another one
            inspect(str(found.root), resume=False, lock=lock)
        if not found.is_ours or found.run_id != run_id:
            about = {"format": FORMAT, "keyhole": keyhole.__version__} | ({"run": run_id} if run_id else {})
            write_text(found.marker, json_text(about) + "\n")
        for path in found.root.iterdir():
            if LEFTOVER.fullmatch(path.name):
                remove(path)
        for path in numbered(found.root):
            finish_deletion(path)
        write_text(found.run / "config.yaml", config_yaml)
        write_text(found.run / "env.json", json_text(environment, indent=2) + "\n")


def new_run_id() -> str:
    return uuid.uuid4().hex
