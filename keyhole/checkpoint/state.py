"""keyhole_state.json of a checkpoint: its content, and the check that every file beside it is intact.

    step, position in the data, the method's scalars, all settings, versions,
    size and CRC-32 of every file, and a CRC-32 of its own text

It is read without torch, so that a resume that must be refused is refused before torch is imported. files.py writes the
other files of a checkpoint.
"""

import json
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from keyhole.disk.files import checksums, read_small
from keyhole.disk.weights_hash import INDEX, OWN_NAME, stored_weights
from keyhole.errors import UserError, listed, printable

FORMAT = 1
STATE = "keyhole_state.json"
NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,9})")  # up to MOST_STEPS
STATE_BYTES = 256 * 2**20  # upper limit; the scalars of LSP and GaLore for a large model take a few megabytes
MOST_STEPS = 2**32 - 1


class Damaged(Exception):
    """A checkpoint that must not be used; the message says what is wrong with it."""


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

    @property
    def tensors(self) -> str:
        """What identifies the tensors of a checkpoint: names, sizes and checksums of their files."""
        files = sorted((name, about) for name, about in self.files.items() if name.endswith(".safetensors"))
        return ", ".join(f"{name} {about.get('bytes')} {about.get('crc32')}" for name, about in files)


def _own_crc(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def dump(content: dict[str, Any]) -> str:
    """The text of keyhole_state.json, with its own checksum."""
    content = json.loads(json.dumps(content))  # as it will be read back
    return json.dumps(content | {"crc32": _own_crc(content)}, indent=1) + "\n"


def _content(file: Path) -> dict[str, Any]:
    content = json.loads(read_small(file, STATE_BYTES))
    if not isinstance(content, dict) or "crc32" not in content or "format" not in content:
        raise Damaged(f"{STATE} is not the state of a checkpoint")
    if content.pop("crc32") != _own_crc(content):
        raise Damaged(f"{STATE} was changed (its checksum does not match)")
    return content


def listed_files(file: Path) -> list[str]:
    """The other files of a checkpoint, as its keyhole_state.json names them, whatever version of keyhole wrote it;
    Damaged if it does not say."""
    try:
        names = list(_content(file)["files"].keys())
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{STATE} cannot be read: {error}") from None
    if any(_is_outside(name) for name in names):
        raise Damaged(f"{STATE} lists files outside of the checkpoint")
    return names


def _is_outside(file: str) -> bool:
    return Path(file).is_absolute() or ".." in Path(file).parts or file == STATE


def read_state(path: Path) -> State:
    """The state of a checkpoint; Damaged if the file is missing, incomplete or changed."""
    try:
        content = _content(path / STATE)
        _check_version(content, path)
        state = State(**content)
        fault = _fault(state, path)
    except FileNotFoundError:
        raise Damaged(f"{STATE} is missing") from None
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{STATE} cannot be read: {error}") from None
    if fault is not None:
        raise Damaged(f"{STATE} cannot be true: {fault}")
    return state


def _check_version(content: dict[str, Any], path: Path) -> None:
    """UserError if another version of keyhole wrote the state. It is no damage: an older checkpoint must not be used
    instead, and this one must not be put aside."""
    unknown = sorted(content.keys() - {each.name for each in fields(State)})
    if content["format"] == FORMAT and not unknown:
        return
    found = f"format {content['format']}" + (f" with {listed(unknown)}" if unknown else "")
    by = content["versions"].get("keyhole") if isinstance(content.get("versions"), dict) else None
    raise UserError(
        f"--resume: {path} was written by another version of keyhole ({printable(str(by), 40)}; {found}, and this one "
        f"reads format {FORMAT}); go on with that version, or name an older checkpoint in a new output_dir"
    )


def _fault(state: State, path: Path) -> str | None:
    """A value that no run could have written, although the checksum is right; None if there is none."""
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
        if _is_outside(file):
            return f"files has {file!r}, which is no file of a checkpoint"
        if type(about["bytes"]) is not int or not isinstance(about["crc32"], str):
            return f"files has {about} for {file}"
    if not any(OWN_NAME.fullmatch(file) for file in state.files) and not state.method.get("light"):
        return "files lists no weights"
    loaded = {"config.json", *stored_weights(path)} | ({INDEX} if (path / INDEX).exists() else set())
    return next((f"files does not list {file}" for file in sorted(loaded - state.files.keys())), None)


def _is_selection(found: Any) -> bool:
    """Whether this is a valid `selection`: pairs (step, number, or null if that was not finite), seconds, and
    fingerprints of rows; or nothing."""
    if found is None:
        return True
    pairs, seconds = found["evaluations"], found["seconds"]
    numbers = [*(step for step, _ in pairs), *(value for _, value in pairs if value is not None), seconds]
    rows = found.get("rows", [])
    listed_rows = isinstance(rows, list) and all(isinstance(row, str) for row in rows)
    return listed_rows and all(type(number) in (int, float) for number in numbers)


def check_sizes(path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Damaged if a file of a checkpoint is missing or incomplete. files: those of its state, or some of them."""
    try:
        for name, expected in files.items():
            if not (path / name).is_file():
                raise Damaged(f"{name} is missing")
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise Damaged(f"{name} has {size} bytes, {expected['bytes']} were written")
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from None


def verify(path: Path, but: Collection[str] = ()) -> State:
    """The state of a checkpoint, if all its files are there, complete and unchanged; Damaged otherwise. but: files that
    do not matter here."""
    state = read_state(path)
    files = {name: expected for name, expected in state.files.items() if name not in but}
    check_sizes(path, files)
    try:
        sums = checksums([path / name for name in files])
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from None
    for (name, expected), crc in zip(files.items(), sums, strict=True):
        if crc != expected["crc32"]:
            raise Damaged(f"{name} was changed (its checksum does not match)")
    return state
