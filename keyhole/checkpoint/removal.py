"""Deleting a checkpoint, and making way for a new one of its name: files that keyhole did not write stay.

    keyhole_state.json -> .keyhole_state.json.deleted    one rename; from here on the directory is no checkpoint
    the files that the state lists, then the state, then the directories that have become empty

The directory keeps its name, so a user's files in it stay where they are. If the process is killed in between, the
renamed state says what is left to be deleted, and the next run in the output directory finishes it.
"""

import itertools
import os
from contextlib import suppress
from pathlib import Path

from keyhole.checkpoint.state import STATE, Damaged, listed_files
from keyhole.disk.files import flush, replace_directory
from keyhole.errors import listed

DELETED = f".{STATE}.deleted"
MOST_SHOWN = 3


def set_aside(path: Path, suffix: str) -> Path:
    """Renames a directory to NAME.suffix, or NAME.suffix1 and so on if there is one already; returns the new name."""
    new = free_name(path, suffix)
    os.replace(path, new)
    return new


def free_name(path: Path, suffix: str) -> Path:
    """A name that nothing has yet: NAME.suffix, NAME.suffix1, ..."""
    names = (path.with_name(f"{path.name}.{suffix}{i or ''}") for i in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def strangers(path: Path) -> list[str]:
    """The files in a checkpoint that its state does not list, by their names in it; Damaged if it cannot be read."""
    own = {STATE, *listed_files(path / STATE)}
    files = [file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
    return sorted(name for file in files if (name := file.relative_to(path).as_posix()) not in own)


def begin(path: Path) -> list[str]:
    """Makes a checkpoint none, so that `finish` will delete it; returns lines about what stays."""
    try:
        kept = strangers(path)
    except Damaged as fault:
        new = set_aside(path, "damaged")
        return [f"warning: {path} is not deleted ({fault}: which files are its own is unknown); it is now {new.name}"]
    os.replace(path / STATE, path / DELETED)
    flush(path)
    which = f"{path} is deleted, except for files in it that keyhole did not write"
    return [f"{which} ({listed(kept, MOST_SHOWN)}): these stay"] if kept else []


def finish(path: Path) -> None:
    """Deletes the files of a checkpoint whose deletion has begun, and the directory, if no other files are in it. What
    cannot be deleted is left."""
    try:
        own = listed_files(path / DELETED)
    except Damaged:  # none is being deleted here
        return
    here = path.resolve()
    own = [name for name in own if (path / name).parent.resolve() == (here / name).parent]  # not behind a link
    for name in own:
        with suppress(OSError):
            (path / name).unlink()
    folders = {folder for name in own for folder in Path(name).parents if folder != Path()}
    for folder in sorted(folders, reverse=True):  # inner ones first
        with suppress(OSError):  # other files are in it
            (path / folder).rmdir()
    if not any(os.path.isfile(path / name) for name in own):
        with suppress(OSError):
            (path / DELETED).unlink()
            path.rmdir()


def put_in_place(new: Path, path: Path) -> list[str]:
    """Moves a complete checkpoint to `path`, and deletes one that had this name. Files there that keyhole did not write
    are moved to checkpoint-N.kept before; returns lines about them."""
    finish(path)
    lines = _make_way(path) if os.path.lexists(path) else []
    replace_directory(new, path)
    return lines


def _make_way(path: Path) -> list[str]:
    try:
        moved = None if path.is_symlink() else strangers(path)
    except Damaged:
        moved = None
    if moved is None:
        new = set_aside(path, "kept")
        return [f"{path} was there already, and is no checkpoint that keyhole wrote: it is called {new.name} now"]
    kept = free_name(path, "kept")
    for name in moved:
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(path / name, kept / name)
    which = f"{path} is replaced; files in it that keyhole did not write ({listed(moved, MOST_SHOWN)})"
    return [f"{which} are in {kept.name} now"] if moved else []
