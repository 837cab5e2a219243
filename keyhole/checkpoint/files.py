"""checkpoint-N/: everything a run needs to go on as if it had never stopped.

    an ordinary Hugging Face model directory, and
    optimizer.safetensors    the method's tensors (AdamW's moments); absent when it has none
    keyhole_state.json       step, position in the data, the method's scalars, all settings, versions,
                             and size and CRC-32 of every file, its own included

Nothing else is state: the learning rate is a function of the step, noise of (seed, step, element), and no
random generator runs in a step. The directory is written under a temporary name, flushed, and appears by one
rename. Host memory of a save: a piece of a tensor (disk/tensors.py); of a load: one tensor.

`run` is the id of the run that wrote it, and `base` the content hash of the model that the run began with (None where
it is not known): a moved model directory is recognised by it. `selection` holds the evaluations of the run so far and
its seconds, from which the best step is chosen. Checkpoints before version 0.2 have none of the three.
"""

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from keyhole.disk.crc import Span
from keyhole.disk.files import checksums, flush_all, read_small, replace_directory, staged
from keyhole.disk.tensors import MethodState, write_tensors
from keyhole.disk.weights_hash import INDEX, OWN_NAME, stored_weights
from keyhole.model.weights.save import write_files

FORMAT = 1
STATE, TENSORS = "keyhole_state.json", "optimizer.safetensors"
OWN_FILES = {STATE, TENSORS}
NAME = re.compile(r"checkpoint-(\d+)")
STATE_BYTES = 256 * 2**20  # at most; LSP's and GaLore's scalars of a large model take a few megabytes
MOST_STEPS = 2**32 - 1


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
    run: str | None = None
    base: str | None = None
    selection: dict[str, Any] | None = None


@dataclass(frozen=True)
class About:
    """What a checkpoint says of its run, beside the weights."""

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
) -> None:
    """Writes a checkpoint, and waits. The method has been flushed; method_state is what its state_dict returned.
    before_rename is called when everything else is done, and may refuse by an exception."""
    tensors, scalars = split_state(method_state)
    with staged(path.parent, path.name) as temporary:
        write_files(model, temporary)
        if tensors:
            write_tensors(temporary / TENSORS, tensors)
        write_state(temporary, about, scalars)
        before_rename()
        replace_directory(temporary, path)


def split_state(method_state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, the rest) of a method's state."""
    tensors = {name: value for name, value in method_state.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in method_state.items() if name not in tensors}


def write_state(
    directory: Path, about: About, scalars: dict[str, Any], sums: dict[str, list[Span]] | None = None
) -> None:
    """Ends a checkpoint, for both writers: keyhole_state.json with the checksums of all files before it; then all
    is flushed to the disk. sums: of their pieces, as far as they are known."""
    inventory = _inventory(directory, sums or {})
    its_own = {"run": about.run, "base": about.base, "selection": about.selection}
    state = State(about.step, about.loader, scalars, about.config, about.versions, inventory, **its_own)
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
        content = json.loads(read_small(path / STATE, STATE_BYTES))
        if content.pop("crc32") != _own_crc(content):
            raise Damaged(f"{STATE} was changed (its checksum does not match)")
        if content["format"] != FORMAT:
            raise Damaged(f"{STATE} has format {content['format']}; this version reads {FORMAT}")
        state = State(**content)
        fault = _fault(state, path)
    except FileNotFoundError:
        raise Damaged(f"{STATE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{STATE} cannot be read: {error}") from None
    if fault is not None:
        raise Damaged(f"{STATE} cannot be true: {fault}")
    return state


def _fault(state: State, path: Path) -> str | None:
    """What no run could have written, though its checksum is right."""
    name = NAME.fullmatch(path.name)
    if type(state.step) is not int or not 0 <= state.step <= MOST_STEPS:
        return f"step is {state.step!r}"
    if name is not None and int(name[1]) != state.step:
        return f"step is {state.step}, and the directory is called {path.name}"
    for key in ("loader", "method", "config", "versions", "files"):
        if not isinstance(getattr(state, key), dict):
            return f"{key} is no table"
    for key in ("run", "base"):
        if not isinstance(getattr(state, key), str | None):
            return f"{key} is {getattr(state, key)!r}"
    if not _is_selection(state.selection):
        return f"selection is {str(state.selection):.100}"
    for file, about in state.files.items():
        if Path(file).is_absolute() or ".." in Path(file).parts or file == STATE:
            return f"files has {file!r}, which is no file of a checkpoint"
        if type(about["bytes"]) is not int or not isinstance(about["crc32"], str):
            return f"files has {about} for {file}"
    if not any(OWN_NAME.fullmatch(file) for file in state.files):
        return "files lists no weights"
    loaded = {"config.json", *stored_weights(path)} | ({INDEX} if (path / INDEX).exists() else set())
    return next((f"files does not list {file}" for file in sorted(loaded - state.files.keys())), None)


def _is_selection(found: Any) -> bool:
    """Pairs (step, number), and seconds; or nothing."""
    if found is None:
        return True
    pairs, seconds = found["evaluations"], found["seconds"]
    numbers = [number for pair in pairs for number in pair] + [seconds]
    return all(len(pair) == 2 for pair in pairs) and all(type(number) in (int, float) for number in numbers)


def verify(path: Path) -> State:
    """The state of a checkpoint whose every file is there, whole and unchanged; Damaged otherwise."""
    state = read_state(path)
    try:
        for name, expected in state.files.items():
            if not (path / name).is_file():
                raise Damaged(f"{name} is missing")
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise Damaged(f"{name} has {size} bytes, {expected['bytes']} were written")
        sums = checksums([path / name for name in state.files])
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from None
    for (name, expected), crc in zip(state.files.items(), sums, strict=True):
        if crc != expected["crc32"]:
            raise Damaged(f"{name} was changed (its checksum does not match)")
    return state


def method_state(path: Path, state: State) -> MethodState:
    """What the method's load_state_dict is given; tensors are read one by one."""
    return MethodState(state.method, path / TENSORS if TENSORS in state.files else None)
