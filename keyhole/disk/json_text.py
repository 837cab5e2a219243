"""JSON that every program can read, JSON files of unknown origin, and result files that the user names.

Python writes `NaN` and `Infinity`, which are not JSON: jq, JavaScript, Go and most parsers refuse the whole file for
one of them. A perplexity is infinite from a loss of 710 on, and a diverged run has many such numbers. All files and
outputs that other programs may read are made here; readers of keyhole take null for "not finite".

JSON of unknown origin becomes typed values: dataclasses, lists, tuples, numbers with bounds.

    decode(found, Result)    all of it is of its type, or ValueError

Names that a dataclass does not have are passed over; those that are missing have their defaults.

`edited` changes one key of an object in its text, and nothing else of it: order, indentation, escapes and line ends of
a published file stay as they are, which writing it anew would not keep.
"""

import dataclasses
import json
import math
import os
import re
import tempfile
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keyhole.disk.files import write_text
from keyhole.errors import UserError
from keyhole.limits import convert
from keyhole.machine.collector import no_collector

Json = dict[str, Any]  # an object

WORDS = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a yes or no", type(None): "null"}
LIMIT_BYTES = 2**28  # the index of a model with a million tensors has 100 MB
HEAD_BYTES = 2**16
LARGEST = 1e100  # larger values cannot be measurements, and their squares overflow
RESULT = re.compile(rb'\{\s*(?:"(?:model|dtype|device)": "[^\n]*",\s*)*"results": ')
PAGE = re.compile(rb'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" ')


def json_text(value: object, *, indent: int | None = None, default: Callable[[Any], object] | None = None) -> str:
    """The value as strict JSON, without a line break at the end. default: as in json.dumps."""
    stricter = None if default is None else lambda each: strict(default(each))
    return json.dumps(strict(value), indent=indent, default=stricter, allow_nan=False)


def strict(value: object) -> Any:
    """The value with None in the place of every float that is not finite, and its name where it is a key."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key if key == strict(key) else str(key): strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value


def read_json(path: Path, what: str, limit_bytes: int = LIMIT_BYTES) -> Json:
    """The object in the file; UserError names `what` and the file otherwise: it is missing or unreadable, is not a
    regular file (a pipe would block, a device never ends), is too large, is not UTF-8, not JSON, or nested too deeply
    for Python."""
    try:
        if not path.is_file():
            raise OSError("there is no such file" if not path.exists() else "it is no ordinary file")
        size = path.stat().st_size
        if size > limit_bytes:
            raise ValueError(f"it has {size:,} bytes; at most {limit_bytes:,} are expected")
        with no_collector():
            found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds {WORDS[type(found)]}, where an object {{...}} is expected")
    except RecursionError:
        raise UserError(f"{what}: {path} cannot be read: its brackets are nested too deeply") from None
    except (OSError, ValueError) as error:  # bad JSON and bad UTF-8 are ValueErrors
        raise UserError(f"{what}: {path} cannot be read, it may be damaged or incomplete: {error}") from error
    return found


ABSENT = object()
BETWEEN = re.compile(r"[ \t\r\n]*[:,]?[ \t\r\n]*")


def edited(text: str, path: Sequence[str], value: object) -> str:
    """The text of a JSON object with another value at `path`: a key, or one of an object within it. A new key comes
    last; with ABSENT the key goes."""
    at = text.index("{")
    for key in path[:-1]:
        at = _members(text, at)[1][key][1]
    first, members = _members(text, at)
    listed, known, lead = list(members.values()), members.get(path[-1]), text[at + 1 : first]
    if value is ABSENT:
        if known is None:
            return text
        before, after = listed[: listed.index(known)], listed[listed.index(known) + 1 :]
        start = before[-1][2] if before and not after else known[0]
        return text[:start] + text[after[0][0] if after else known[2] :]
    shown = json.dumps(value, indent=2 if "\n" in lead else None, ensure_ascii=text.isascii()).replace("\n", lead)
    if known is not None:
        return text[: known[1]] + shown + text[known[2] :]
    end, added = listed[-1][2] if listed else at + 1, f"{json.dumps(path[-1])}: {shown}"
    return text[:end] + (f",{lead}{added}" if listed else lead + added) + text[end:]


def _members(text: str, at: int) -> tuple[int, dict[str, tuple[int, int, int]]]:
    """Of the object at text[at]: where its first key begins, and of each key (of one that is there twice, the last)
    where it begins, and where its value begins and ends."""
    found, decode = dict[str, tuple[int, int, int]](), json.JSONDecoder().raw_decode
    first = begin = _past(text, at + 1)
    while text[begin] != "}":
        key, end = decode(text, begin)
        value = _past(text, end)
        _, end = decode(text, value)
        found.pop(key, None)
        found[key] = begin, value, end
        begin = _past(text, end)
    return first, found


def _past(text: str, at: int) -> int:
    between = BETWEEN.match(text, at)
    return at if between is None else between.end()


def check_result_file(option: str, path: Path) -> None:
    """Before hours of work: UserError if a file that the user named (--json) cannot be written, or holds
    something else than an earlier result: `--json train.jsonl` is a slip of the hand, and must not cost the data. The
    beginning of a file tells. Anything that is no ordinary file is refused: a result is written under another name and
    renamed, which would replace a pipe, a device (/dev/null, for root) or a link by a file."""
    if path.is_dir():
        raise UserError(f"{option}: {path} is a directory; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
        is_ours = not os.path.lexists(path)
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
            is_ours = not head or any(kind.match(head) for kind in (RESULT, PAGE))
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written: {error.strerror or error}") from error
    if not is_ours:
        what = "exists and is no earlier result" if path.is_file() else "is a pipe or a device"
        what = "is a link" if path.is_symlink() else what
        raise UserError(f"{option}: {path} {what}, and would be replaced; name another file, or move this one away")


def write_result(option: str, path: Path, text: str, shown: str) -> None:
    """Writes the file. shown: the text that is shown if that fails."""
    try:
        write_text(path, text)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{option}: {path} cannot be written: {why}; what it would have held:\n{shown}") from error


def finite(value: object) -> float | None:
    """The value as a number; None if it is not a number, not finite, or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None


def decode(value: object, kind: Any) -> Any:
    """The JSON value as one of this type; ValueError if it is none."""
    return convert(value, kind, _decoded, empty=True)


def _decoded(value: object, kind: Any) -> object:
    """A dataclass, a tuple, or a value without parts."""
    arms = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and isinstance(value, list) and len(value) == len(arms):
        return tuple(decode(each, arm) for each, arm in zip(value, arms, strict=True))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind, include_extras=True)
        try:
            return kind(**{name: decode(value[name], hints[name]) for name in hints if name in value})
        except TypeError as error:  # a field without a default is missing
            raise ValueError(str(error)) from None
    if kind is Any or type(value) is kind or kind is float:
        if kind in (Any, str, bool, types.NoneType) or finite(value) is not None:
            return value
    raise ValueError(f"not {kind}")
