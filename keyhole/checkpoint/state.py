"""keyhole_state.json of a checkpoint: its content, and the check that every file beside it is intact.

    step, position in the data, the method's scalars, all settings, versions,
    size and CRC-32 of every file, and a CRC-32 of its own text

There is no other state: the learning rate is a function of the step, noise is a function of (seed, step, element), and
no random generator runs in a step. The file is read without torch, so that a resume that must be refused is refused
before torch is imported. writer.py writes checkpoints.
"""

import json
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from keyhole.disk.files import checksums, read_small
from keyhole.disk.json_text import Json, decode
from keyhole.disk.weight_files import INDEX, OWN_NAME, stored_weights
from keyhole.errors import UserError, printable
from keyhole.limits import Limit

FORMAT = 2
STATE, TENSORS = "keyhole_state.json", "optimizer.safetensors"
OWN_FILES = {STATE, TENSORS}  # which only a run can use
NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,9})")  # up to MOST_STEPS
STATE_BYTES = 256 * 2**20  # upper limit; the scalars of LSP and GaLore for a large model take a few megabytes
MOST_STEPS = 2**32 - 1


class Damaged(Exception):
    """A checkpoint that must not be used; the message says what is wrong with it."""


@dataclass(frozen=True)
class Written:
    bytes: int
    crc32: str


@dataclass(frozen=True)
class State:
    """keyhole_state.json. `config` is flat, by dotted key. `run` is the id of the run that wrote the checkpoint, `base`
    the content hash of the run's original model (None: unknown), which identifies a directory that was moved, and
    `base_config` the numbers of its config.json (config_files.py `identity`); `pass_tokens` the most tokens of a pass,
    where micro-batches are split; `selection` says which rows and questions evaluations are made on, whose numbers
    alone can be compared."""

    step: Annotated[int, Limit(0, MOST_STEPS)]
    loader: Json = field(default_factory=dict)
    method: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    versions: Json = field(default_factory=dict)
    files: dict[str, Written] = field(default_factory=dict)
    format: int = FORMAT
    run: str | None = None
    base: str | None = None
    base_config: Json | None = None
    pass_tokens: Annotated[int, Limit(1)] | None = None
    selection: Json | None = None

    @property
    def tensors(self) -> str:
        """What identifies the tensors of a checkpoint: names, sizes and checksums of their files."""
        files = sorted((name, about) for name, about in self.files.items() if name.endswith(".safetensors"))
        return ", ".join(f"{name} {about.bytes} {about.crc32}" for name, about in files)


def _own_crc(content: Json) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def dump(content: Json) -> str:
    content = json.loads(json.dumps(content))  # as it will be read back
    return json.dumps(content | {"crc32": _own_crc(content)}, indent=1) + "\n"


def _content(file: Path) -> Json:
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
    """The state of a checkpoint; Damaged if the file is missing, incomplete or changed. UserError if another version of
    keyhole wrote it: that is no damage, and an older checkpoint must not be used instead."""
    try:
        content = _content(path / STATE)
        if content["format"] != FORMAT:
            by = content["versions"].get("keyhole") if isinstance(content.get("versions"), dict) else None
            raise UserError(
                f"--resume: {path} was written by another version of keyhole ({printable(str(by), 40)}, format "
                f"{printable(str(content['format']), 40)}; this one reads format {FORMAT}); go on with that version, "
                "or name another checkpoint in a new output_dir"
            )
        state: State = decode(content, State)
        fault = _fault(state, path)
    except FileNotFoundError:
        raise Damaged(f"{STATE} is missing") from None
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{STATE} cannot be read: {error}") from None
    if fault is not None:
        raise Damaged(f"{STATE} cannot be true: {fault}")
    return state


def _fault(state: State, path: Path) -> str | None:
    """What no run could have written, although the checksum is right; None if there is nothing."""
    name = NAME.fullmatch(path.name)
    if name is not None and int(name[1]) != state.step:
        return f"step is {state.step}, and the directory is called {path.name}"
    if outside := [file for file in state.files if _is_outside(file)]:
        return f"files has {outside[0]!r}, which is no file of a checkpoint"
    if not any(OWN_NAME.fullmatch(file) for file in state.files) and not state.method.get("light"):
        return "files lists no weights"
    loaded = {"config.json", *stored_weights(path)} | ({INDEX} if (path / INDEX).exists() else set())
    return next((f"files does not list {file}" for file in sorted(loaded - state.files.keys())), None)


def check_sizes(path: Path, files: dict[str, Written]) -> None:
    """Damaged if a file of a checkpoint is missing or incomplete. files: those of its state, or some of them."""
    for name, expected in files.items():
        if not (path / name).is_file():
            raise Damaged(f"{name} is missing")
        if (size := (path / name).stat().st_size) != expected.bytes:
            raise Damaged(f"{name} has {size} bytes, {expected.bytes} were written")


def verify(path: Path, but: Collection[str] = ()) -> State:
    """The state of a checkpoint, if all its files are there, complete and unchanged; Damaged otherwise. but: files that
    do not matter here."""
    state = read_state(path)
    files = {name: expected for name, expected in state.files.items() if name not in but}
    try:
        check_sizes(path, files)
        sums = checksums([path / name for name in files])
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from None
    for (name, expected), crc in zip(files.items(), sums, strict=True):
        if crc != expected.crc32:
            raise Damaged(f"{name} was changed (its checksum does not match)")
    return state
