"""The output directory: whose it is, and what goes into run/.

    output_dir/            the trained model, an ordinary Hugging Face directory
      checkpoint-N/        the same plus keyhole_state.json and optimizer.safetensors
      run/keyhole.json     the marker: this directory is ours (and the format's version)
      run/config.yaml      every setting of the run      run/env.json   versions and hardware
      run/metrics.jsonl    one line a step               run/loss.png   the curve
      run/journal          zeroth-order: one record a step (checkpoint/journal/format.py)
      run/lock             held by the process that writes here (lock.py)

Nothing that is not ours is written over, and nothing of ours without --resume. The look at the directory
(`inspect`) changes nothing; it is made (`open_run`) only when data and model have turned out to be good.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keyhole
from keyhole.checkpoint.journal import format as journal
from keyhole.checkpoint.select import checkpoints
from keyhole.disk.files import flush, write_text
from keyhole.errors import UserError
from keyhole.training.lock import Lock

FORMAT = 1
LEFTOVERS = (".*.saving-*", ".*.old-*")  # what a killed process left half-written or half-deleted


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def marker(self) -> Path:
        return self.run / "keyhole.json"

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        return self.run / "loss.png"

    @property
    def journal(self) -> Path:
        return self.run / "journal"

    @property
    def lock(self) -> Path:
        return self.run / "lock"

    @property
    def is_ours(self) -> bool:
        return self.marker.is_file()

    @property
    def has_model(self) -> bool:
        return any(self.root.glob("model*.safetensors"))


def inspect(output_dir: str, resume: bool) -> RunDir:
    """Whether a run may write here; UserError says what to change otherwise."""
    found = RunDir(Path(output_dir))
    if not os.path.lexists(found.root):
        return found
    if not found.root.is_dir():
        raise UserError(f"output_dir: {found.root} is a file; choose a directory")
    stranger = None if found.is_ours else _first_file(found.root)
    if stranger is not None:
        raise UserError(
            f"output_dir: {found.root} holds files that keyhole did not write (such as {stranger.name}); "
            "choose a new or empty directory"
        )
    if not resume and (checkpoints(found.root) or found.has_model or _has_steps(found.journal)):
        last = "a finished model" if found.has_model else "a journal of steps"
        last = checkpoints(found.root)[-1].name if checkpoints(found.root) else last
        raise UserError(
            f"output_dir: {found.root} holds a run already ({last}); go on from there with --resume, "
            "or choose another output_dir"
        )
    return found


def _has_steps(path: Path) -> bool:
    """Whether a journal holds a record; one that cannot be read counts as if it did."""
    try:
        return path.exists() and bool(journal.read(path).records)
    except (OSError, journal.BadJournal):
        return True


def _first_file(root: Path) -> Path | None:
    """Any file below `root`, other than what a process leaves that is killed before its marker is there."""
    early = {root / "run" / "lock", root / "run" / ".keyhole.json.tmp"}
    try:
        return next((p for p in root.rglob("*") if not p.is_dir() and p not in early), None)
    except OSError as error:
        raise UserError(f"output_dir: {root} cannot be read: {error.strerror}") from error


def open_run(found: RunDir, config_yaml: str, environment: dict[str, Any], lock: Lock) -> None:
    """Makes the directory ours, and writes down settings and environment."""
    try:
        found.run.mkdir(parents=True, exist_ok=True)
        lock.take()
        if not found.is_ours:
            write_text(found.marker, json.dumps({"format": FORMAT, "keyhole": keyhole.__version__}) + "\n")
        for pattern in LEFTOVERS:
            for path in found.root.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        write_text(found.run / "config.yaml", config_yaml)
        write_text(found.run / "env.json", json.dumps(environment, indent=2) + "\n")
        flush(found.run)
    except OSError as error:
        raise UserError(f"output_dir: cannot write to {found.root}: {error.strerror}") from error
