"""Which checkpoints there are, which of them are whole, and which go.

A run goes on from the newest checkpoint that passes `verify`; damaged ones are named and passed over. Old
ones are deleted only after a newer one is complete on disk, so there is always one to go back to.
"""

import itertools
import os
import re
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from keyhole.checkpoint.state import STATE, Damaged, State, verify
from keyhole.errors import UserError

NAME = re.compile(r"checkpoint-(\d+)")
LAST = ("", "auto", "last")


def step_of(path: Path) -> int:
    """N of checkpoint-N."""
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def checkpoints(root: Path) -> list[Path]:
    """The directories called checkpoint-N in `root`, oldest first, whole or not."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from (None: none), and the newer, damaged ones that were passed over."""

    path: Path | None = None
    state: State | None = None
    damaged: dict[Path, str] = field(default_factory=dict)


def newest(root: Path) -> Choice:
    """The newest whole checkpoint in `root`."""
    damaged: dict[Path, str] = {}
    for path in reversed(checkpoints(root)):
        try:
            return Choice(path, verify(path), damaged)
        except Damaged as fault:
            damaged[path] = str(fault)
    return Choice(damaged=damaged)


def choose(resume: str, root: Path) -> Choice:
    """The checkpoint that `--resume` means: the newest in `root` for a word of LAST, or the path given."""
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
    _refuse_to_branch(asked, root)
    return Choice(asked, state)


def _refuse_to_branch(path: Path, root: Path) -> None:
    """Going on from an older checkpoint would mix two histories in one directory."""
    own = checkpoints(root)
    if path.resolve().parent == root.resolve() and own[-1].name != path.name:
        raise UserError(
            f"--resume: {root} holds {own[-1].name} too, which is later than {path.name}; delete it, "
            "or go on in another output_dir"
        )


def rename_damaged(paths: Iterable[Path]) -> None:
    """Renames damaged checkpoints to checkpoint-N.damaged: nothing is lost, and none counts as good."""
    for path in paths:
        names = (path.with_name(f"{path.name}.damaged{i or ''}") for i in itertools.count())
        os.replace(path, next(name for name in names if not name.exists()))


def prune(root: Path, keep: int | None, up_to: int) -> threading.Thread:
    """Puts the oldest checkpoints of steps <= up_to out of sight until `keep` are left, and begins to delete them: for
    gigabytes that takes a while. Room is there when the thread has ended."""
    own = [path for path in checkpoints(root) if step_of(path) <= up_to]
    gone = [] if keep is None else own[: max(0, len(own) - max(1, keep))]
    hidden = [path.with_name(f".{path.name}.old-{os.getpid()}") for path in gone]
    for path, name in zip(gone, hidden, strict=True):
        os.replace(path, name)  # a half-deleted checkpoint never looks like one
    thread = threading.Thread(target=_delete, args=(hidden,), name="keyhole-delete")
    thread.start()
    return thread


def _delete(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
