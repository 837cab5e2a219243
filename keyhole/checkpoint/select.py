"""Which checkpoints a directory has, which of them are intact, and which are deleted.

A run resumes from the newest checkpoint that passes `verify`; damaged ones are named and skipped. Old checkpoints are
deleted only after a newer one is complete on the disk, so there is always one to go back to. What has the name of a new
one already gets another name. Files that keyhole did not write stay when a checkpoint is deleted:

    keyhole_state.json -> .keyhole_state.json.deleted    one rename; from here on the directory is no checkpoint
    the files that the state lists, then the state, then the directories that have become empty

The directory keeps its name, so a user's files in it stay where they are. If the process is killed in between, the
renamed state says what is left to be deleted, and the next run in the output directory finishes it.
"""

import itertools
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from keyhole.checkpoint.state import NAME, STATE, Damaged, State, listed_files, verify
from keyhole.disk.files import flush
from keyhole.errors import UserError, listed

LAST = ("", "auto", "last")
DELETED = f".{STATE}.deleted"
MOST_SHOWN = 3


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


def numbered(root: Path) -> list[Path]:
    """The directories called checkpoint-N in `root`, oldest first, whoever wrote them."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def checkpoints(root: Path) -> list[Path]:
    """The directories called checkpoint-N that keyhole wrote, intact or not: these have a state. A directory of such a
    name that the user made has none; it is neither read nor renamed nor deleted."""
    return [path for path in numbered(root) if os.path.isfile(path / STATE)]


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from (None: none), and the newer ones that were skipped: damaged ones, and directories
    without a state."""

    path: Path | None = None
    state: State | None = None
    damaged: dict[Path, str] = field(default_factory=dict)
    strange: list[Path] = field(default_factory=list)


def newest(root: Path) -> Choice:
    found = Choice()
    for path in reversed(numbered(root)):
        if not os.path.isfile(path / STATE):
            if not os.path.lexists(path / DELETED):  # else the next run finishes its deletion
                found.strange.append(path)
            continue
        try:
            return replace(found, path=path, state=verify(path))
        except Damaged as fault:
            found.damaged[path] = str(fault)
    return found


def choose(resume: str, root: Path) -> Choice:
    """The checkpoint of `--resume`: the newest in `root` for one of the words in LAST, or the given path."""
    if resume in LAST:
        choice = newest(root)
        if choice.path is None and choice.damaged:
            faults = [f"  {path.name}: {fault}" for path, fault in choice.damaged.items()]
            raise UserError("\n".join([f"--resume: every checkpoint in {root} is damaged", *faults]))
        return choice
    asked = Path(resume)
    if not asked.is_dir():
        raise UserError(f"--resume: {asked} is not a directory; give a checkpoint-N, or --resume alone for the last")
    if not (asked / STATE).exists() and checkpoints(asked):
        return choose("last", asked)
    try:
        state = verify(asked)
    except Damaged as fault:
        raise UserError(f"--resume: {asked} cannot be used: {fault}") from None
    if asked.resolve().parent == root.resolve():
        refuse_to_branch(state.step, asked, root)
    return Choice(asked, state)


def refuse_to_branch(step: int, path: Path, root: Path) -> None:
    """Refuses to resume from an older checkpoint, which would mix two histories in one directory."""
    own = checkpoints(root)
    if own and step_of(own[-1]) > step:
        raise UserError(
            f"--resume: {root} holds {own[-1].name} too, which is later than {path.name}; delete it, "
            "or go on in another output_dir"
        )


# -- deleting ----------------------------------------------------------------------------------------------------------


def set_aside(path: Path, suffix: str) -> Path:
    """Renames a directory to NAME.suffix, or NAME.suffix1 and so on if there is one already; returns the new name."""
    names = (path.with_name(f"{path.name}.{suffix}{i or ''}") for i in itertools.count())
    new = next(name for name in names if not os.path.lexists(name))
    os.replace(path, new)
    return new


def prune(
    root: Path, keep: int | None, up_to: int, say: Callable[[str], None] = print, spare: int | None = None
) -> None:
    """Deletes the oldest checkpoints of steps <= up_to until `keep` are left. spare: a step whose checkpoint is kept
    and not counted."""
    try:
        own = [path for path in checkpoints(root) if step_of(path) <= up_to and step_of(path) != spare]
        own = [path for path in own if not path.is_symlink()]  # a user's, perhaps to one of these
    except OSError as error:
        say(f"warning: {root} cannot be read, and old checkpoints stay: {error.strerror}")
        return
    delete([] if keep is None else own[: max(0, len(own) - max(1, keep))], say)


def delete(paths: Iterable[Path], say: Callable[[str], None] = print) -> None:
    """Deletes checkpoints, except for files in them that keyhole did not write. One that cannot be deleted is kept,
    with a message; a link to one is the user's."""
    for path in paths:
        try:
            if not path.is_symlink():
                begin_deletion(path, say)
                finish_deletion(path)
        except OSError as error:
            say(f"warning: {path} is not needed any more, but cannot be deleted: {error.strerror}")


def begin_deletion(path: Path, say: Callable[[str], None] = print) -> None:
    """Makes a checkpoint none, so that `finish_deletion` will delete it; says what stays."""
    try:
        own = {STATE, *listed_files(path / STATE)}
    except Damaged as fault:
        new = set_aside(path, "damaged")
        say(f"warning: {path} is not deleted ({fault}: which files are its own is unknown); it is now {new.name}")
        return
    files = [file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
    kept = sorted(name for file in files if (name := file.relative_to(path).as_posix()) not in own)
    os.replace(path / STATE, path / DELETED)
    flush(path)
    if kept:
        which = f"{path} is deleted, except for files in it that keyhole did not write"
        say(f"{which} ({listed(kept, MOST_SHOWN)}): these stay")


def finish_deletion(path: Path) -> None:
    """Deletes the files of a checkpoint whose deletion has begun, and the directory, if no other files are in it. What
    cannot be deleted is left."""
    try:
        own = listed_files(path / DELETED)
    except Damaged:  # none is being deleted here
        return
    own = [
        name for name in own if (path / name).parent.resolve() == (path.resolve() / name).parent
    ]  # not behind a link
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
    """Gives a complete checkpoint its name. What has that name already is called checkpoint-N.kept then; returns a line
    about that."""
    finish_deletion(path)
    lines: list[str] = []
    if os.path.lexists(path):
        lines = [f"{path} was there already: it is called {set_aside(path, 'kept').name} now"]
    os.replace(new, path)
    flush(path.parent)
    return lines
