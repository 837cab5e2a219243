"""checkpoint-N/: everything a run needs to go on as if it had never stopped.

    an ordinary Hugging Face model directory, and
    optimizer.safetensors    the method's tensors (AdamW's moments); absent when it has none
    keyhole_state.json       step, position in the data, the method's scalars, all settings, versions,
                             and size and CRC-32 of every file, its own included

Nothing else is state: the learning rate is a function of the step, noise of (seed, step, element), and no
random generator runs in a step. The directory is written beside its place, flushed, and appears by one
rename. Host memory of a save: a piece of a tensor (disk/tensors.py); of a load: one tensor.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from keyhole.disk.crc import Span
from keyhole.disk.files import checksums, flush_all, replace_directory, staged
from keyhole.disk.tensors import MethodState, write_tensors
from keyhole.model.weights.save import write_files

FORMAT = 1
STATE, TENSORS = "keyhole_state.json", "optimizer.safetensors"
OWN_FILES = {STATE, TENSORS}


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the message says what is wrong with it."""


@dataclass(frozen=True)
class State:
    """keyhole_state.json. `config` is flat, by dotted key."""

    step: int
    loader: dict[str, Any]
    method: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, Any]
    files: dict[str, dict[str, Any]]
    format: int = FORMAT


@dataclass(frozen=True)
class About:
    """What a checkpoint says of its run, beside the weights."""

    step: int
    loader: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, Any]


def save_checkpoint(path: Path, model: Any, method_state: dict[str, Any], about: About) -> None:
    """Writes a checkpoint, and waits. The method has been flushed; method_state is what its state_dict returned."""
    tensors, scalars = split_state(method_state)
    with staged(path.parent, path.name) as temporary:
        write_files(model, temporary)
        if tensors:
            write_tensors(temporary / TENSORS, tensors)
        write_state(temporary, about, scalars)
        replace_directory(temporary, path)


def split_state(method_state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, the rest) of a method's state."""
    tensors = {name: value for name, value in method_state.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in method_state.items() if name not in tensors}


def write_state(
    directory: Path, about: About, scalars: dict[str, Any], sums: dict[str, list[Span]] | None = None
) -> None:
    """The last file of a checkpoint, with the checksums of all others; then everything is flushed to the disk. sums: of
    their pieces, as far as they are known."""
    inventory = _inventory(directory, sums or {})
    state = State(about.step, about.loader, scalars, about.config, about.versions, inventory)
    (directory / STATE).write_text(_dump(asdict(state)), encoding="utf-8")
    flush_all(directory)


def _inventory(directory: Path, sums: dict[str, list[Span]]) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [file.relative_to(directory).as_posix() for file in files]
    rows = zip(names, files, checksums(files, [sums.get(name, []) for name in names]), strict=True)
    return {name: {"bytes": file.stat().st_size, "crc32": crc} for name, file, crc in rows}


def _own_crc(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _dump(content: dict[str, Any]) -> str:
    content = json.loads(json.dumps(content))  # as it will be read back
    return json.dumps(content | {"crc32": _own_crc(content)}, indent=1) + "\n"


def read_state(path: Path) -> State:
    """The state of a checkpoint; Damaged when the file is missing, torn or changed."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        if content.pop("crc32") != _own_crc(content):
            raise Damaged(f"{STATE} was changed (its checksum does not match)")
        if content["format"] != FORMAT:
            raise Damaged(f"{STATE} has format {content['format']}; this version reads {FORMAT}")
        return State(**content)
    except FileNotFoundError:
        raise Damaged(f"{STATE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{STATE} cannot be read: {error}") from None


def verify(path: Path) -> State:
    """The state of a checkpoint whose every file is there, whole and unchanged; Damaged otherwise."""
    state = read_state(path)
    for name, expected in state.files.items():
        if not (path / name).is_file():
            raise Damaged(f"{name} is missing")
        size = (path / name).stat().st_size
        if size != expected["bytes"]:
            raise Damaged(f"{name} has {size} bytes, {expected['bytes']} were written")
    sums = checksums([path / name for name in state.files])
    for (name, expected), crc in zip(state.files.items(), sums, strict=True):
        if crc != expected["crc32"]:
            raise Damaged(f"{name} was changed (its checksum does not match)")
    return state


def method_state(path: Path, state: State) -> MethodState:
    """What the method's load_state_dict is given; tensors are read one by one."""
    return MethodState(state.method, path / TENSORS if TENSORS in state.files else None)
