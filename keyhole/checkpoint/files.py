"""checkpoint-N/: everything that a run needs to continue as if it had never stopped.

    an ordinary Hugging Face model directory, and
    optimizer.safetensors    the method's tensors (AdamW's moments); absent if it has none
    keyhole_state.json       step, position in the data, the method's scalars, all settings, versions,
                             and size and CRC-32 of every file, itself included

A light checkpoint (Traits.light) has no weights: the method's tensors contain all changes to the original model.

There is no other state: the learning rate is a function of the step, noise is a function of (seed, step, element), and
no random generator runs in a step. The directory is written under a temporary name, flushed, and renamed. A save needs
host memory for a piece of a tensor (disk/tensors.py), a load for one tensor.

`run` is the id of the run that wrote the checkpoint, and `base` the content hash of the run's original model (None if
unknown), which identifies a model directory that was moved. `selection` has the evaluations and the training seconds of
the run so far, from which the best step is selected. Checkpoints before version 0.2 have none of the three.
"""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from keyhole.checkpoint.removal import put_in_place
from keyhole.checkpoint.state import STATE, State, dump
from keyhole.disk.crc import Span
from keyhole.disk.files import checksums, flush_all, staged
from keyhole.disk.tensors import MethodState, Ranges, write_tensors
from keyhole.model.weights.save import write_files
from keyhole.model.weights.save_parts import write_state_parts
from keyhole.model.weights.saved_files import write_small_files

TENSORS = "optimizer.safetensors"
OWN_FILES = {STATE, TENSORS}


@dataclass(frozen=True)
class About:
    """The description of the run in a checkpoint."""

    step: int
    loader: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, Any]
    run: str | None = None
    base: str | None = None
    selection: dict[str, Any] | None = None


def save_checkpoint(
    path: Path,
    model: Any,
    method_state: dict[str, Any],
    about: About,
    before_rename: Callable[[], None] = lambda: None,
) -> list[str]:
    """Writes a checkpoint and returns when it is complete. The method must have been flushed; method_state is the
    result of its state_dict. before_rename is called just before the rename, and may prevent it by an exception.
    Returns lines about a user's files of that name."""
    tensors, scalars = split_state(method_state)
    with staged(path.parent, path.name) as temporary:
        if method_state.get("light"):
            write_small_files(model, temporary)
        else:
            write_files(model, temporary, merged=False)
        if any(isinstance(tensor, Ranges) for tensor in tensors.values()):
            write_state_parts(model, temporary / TENSORS, tensors)
        elif tensors:
            write_tensors(temporary / TENSORS, tensors)
        write_state(temporary, about, scalars)
        before_rename()
        return put_in_place(temporary, path)


def split_state(method_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, the rest) of a method's state."""
    tensors = {name: value for name, value in method_state.items() if isinstance(value, torch.Tensor | Ranges)}
    return tensors, {name: value for name, value in method_state.items() if name not in tensors}


def write_state(
    directory: Path,
    about: About,
    scalars: dict[str, Any],
    sums: dict[str, list[Span]] | None = None,
    leave_out: Collection[str] = (),
) -> None:
    """Completes a checkpoint, for both writers: writes keyhole_state.json with the checksums of all other files, and
    flushes everything to the disk. sums: known checksums of pieces of the files; leave_out: files that are none of the
    checkpoint's."""
    inventory = {name: row for name, row in _inventory(directory, sums or {}).items() if name not in leave_out}
    its_own: dict[str, Any] = {"run": about.run, "base": about.base, "selection": about.selection}
    state = State(about.step, about.loader, scalars, about.config, about.versions, inventory, **its_own)
    (directory / STATE).write_text(dump(asdict(state)), encoding="utf-8")
    flush_all(directory)


def _inventory(directory: Path, sums: dict[str, list[Span]]) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [file.relative_to(directory).as_posix() for file in files]
    rows = zip(names, files, checksums(files, [sums.get(name, []) for name in names]), strict=True)
    return {name: {"bytes": file.stat().st_size, "crc32": crc} for name, file, crc in rows}


def method_state(path: Path, state: State) -> MethodState:
    """The argument of the method's load_state_dict; tensors are read one by one."""
    return MethodState(state.method, path / TENSORS if TENSORS in state.files else None)
