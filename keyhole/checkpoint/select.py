"""Which checkpoints a directory has, which of them are intact, and which are deleted.

A run resumes from the newest checkpoint that passes `verify`; damaged ones are named and skipped. Old checkpoints are
deleted only after a newer one is complete on the disk, so there is always one to go back to.
"""

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from keyhole.checkpoint import removal
from keyhole.checkpoint.state import NAME, STATE, Damaged, State, verify
from keyhole.errors import UserError

LAST = ("", "auto", "last")


def step_of(path: Path) -> int:
    """N of checkpoint-N."""
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def numbered(root: Path) -> list[Path]:
    """The directories called checkpoint-N in `root`, oldest first, whoever wrote them."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


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
    """The newest intact checkpoint in `root`."""
    found = Choice()
    for path in reversed(numbered(root)):
        if not os.path.isfile(path / STATE):
            if not os.path.lexists(path / removal.DELETED):  # else the next run finishes its deletion
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


def rename_damaged(paths: Iterable[Path]) -> list[Path]:
    """Renames damaged checkpoints to checkpoint-N.damaged: they are kept, but no longer count as checkpoints. Returns
    the new names."""
    return [removal.set_aside(path, "damaged") for path in paths]


def prune(
    root: Path, keep: int | None, up_to: int, say: Callable[[str], None] = print, spare: int | None = None
) -> threading.Thread:
    """Deletes the oldest checkpoints of steps <= up_to until `keep` are left. spare: a step whose checkpoint is kept
    and not counted."""
    try:
        own = [path for path in checkpoints(root) if step_of(path) <= up_to and step_of(path) != spare]
        own = [path for path in own if not path.is_symlink()]  # a user's, perhaps to one of these
    except OSError as error:
        say(f"warning: {root} cannot be read, and old checkpoints stay: {error.strerror}")
        own = []
    return delete([] if keep is None else own[: max(0, len(own) - max(1, keep))], say)


def delete(paths: Iterable[Path], say: Callable[[str], None] = print) -> threading.Thread:
    """Deletes checkpoints, except for files in them that keyhole did not write (removal.py). They are none any more
    when this returns; the files are deleted in a thread, because deleting gigabytes takes a while: the room is free
    when it has ended. A checkpoint that cannot be deleted is kept, with a message; a link to one is the user's."""
    begun: list[Path] = []
    for path in paths:
        if path.is_symlink():
            continue
        try:
            for line in removal.begin(path):
                say(line)
            begun.append(path)
        except OSError as error:
            say(f"warning: {path} is not needed any more, but cannot be deleted: {error.strerror}")

    def finish() -> None:
        for path in begun:
            removal.finish(path)

    thread = threading.Thread(target=finish, name="keyhole-delete")
    thread.start()
    return thread
