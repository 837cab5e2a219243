"""Reads the rows of one file, by its suffix, and refuses broken or hostile files with a clear message.

    .jsonl .ndjson     an object per line                       .csv .tsv     a header, then a row per record
    .json              a list of objects, or JSONL              .parquet      columns; also .arrow (`save_to_disk`)
    .txt .text .md     documents (documents.py)

Text formats may be compressed (.jsonl.gz). opened.py opens a file within bounds; delimited.py splits cells and
interprets quotation marks; columns.py reads Parquet and Arrow. JSON is read here.

Rows are yielded one at a time, each with its place in the file, so that every later error can say "train.jsonl, line
17" instead of a bare KeyError. JSONL counts lines, CSV and Parquet count rows from 1 without the header. Keys that
Parquet fills with null inside a nested value, because another row has them, are removed again.

"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keyhole.data.columns import read_arrow, read_parquet
from keyhole.data.delimited import read_cells
from keyhole.data.documents import read_documents
from keyhole.data.opened import PLAIN, SUFFIXES, bounded_lines, kind_of, open_text, told
from keyhole.data.record import Record, check_header
from keyhole.errors import UserError, listed

MOST_JSON_BYTES = 2**31


def read_file(path: Path) -> Iterator[Record]:
    """The rows of one local file."""
    readers = {".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": read_parquet, ".arrow": read_arrow}
    readers |= dict.fromkeys(PLAIN, read_documents)
    reader = readers.get(kind_of(path), _jsonl if kind_of(path) else None)
    if reader is None:
        known = ", ".join(SUFFIXES)
        raise UserError(f"{path}: unknown kind of file {path.suffix!r}; expected one of {known} (text also with .gz)")
    with told(path):
        yield from reader(path)


def _object(value: Any, path: Path, unit: str, number: int) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{path}, {unit} {number}: expected an object with named columns, found {type(value).__name__}")
    return Record(str(path), unit, number, value)


class _Twice(ValueError):
    """A key occurs twice in an object."""


def keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; refuses a repeated key, whose second value would silently win."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _Twice(json.dumps(twice))
    return found


def _load(text: str, path: Path, line: int | None) -> Any:
    """Parses JSON, or raises an error that says what is wrong; line: the line of the file, if the text is one line."""
    try:
        return json.loads(text, object_pairs_hook=keys_once)
    except _Twice as error:
        raise UserError(
            f"{path}{f', line {line}' if line else ''}: the key {error} stands twice in one object"
        ) from None
    except json.JSONDecodeError as error:
        at = line or error.lineno
        raise UserError(f"{path}, line {at}: not valid JSON: {_fault(error)}") from error
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise UserError(f"{path}{f', line {line}' if line else ''}: JSON that cannot be read: {what}") from None


def _jsonl(path: Path) -> Iterator[Record]:
    with open_text(path) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            if line.strip():
                yield _object(_load(line.rstrip(), path, number), path, "line", number)


def load_json(path: Path) -> Any:
    """The JSON value of a file; None if the file is empty."""
    if path.stat().st_size > MOST_JSON_BYTES:
        raise UserError(
            f"{path}: {path.stat().st_size:,} bytes in one JSON value; write it as JSONL, an object per line"
        )
    with open_text(path) as file:
        text = file.read(MOST_JSON_BYTES)
    return _load(text.rstrip(), path, None) if text.strip() else None


def _json(path: Path) -> Iterator[Record]:
    try:
        value = load_json(path)
    except UserError as error:
        if not is_lines(error):
            raise
        yield from _jsonl(path)
        return
    if value is None:
        return
    if not isinstance(value, list):
        keys = f" with keys {listed(value)}" if isinstance(value, dict) else ""
        raise UserError(
            f"{path}: expected a list of rows, found {type(value).__name__}{keys}; "
            "write a list of objects, or one object per line (JSONL)"
        )
    for number, item in enumerate(value, 1):
        yield _object(item, path, "item", number)


def is_lines(error: UserError) -> bool:
    """Whether JSON could not be read because the file has one object per line."""
    cause = error.__cause__
    if not isinstance(cause, json.JSONDecodeError) or cause.msg != "Extra data":
        return False
    return cause.doc.lstrip().startswith("{")


def _fault(error: json.JSONDecodeError) -> str:
    """What is wrong, in which column of the line, and the text around it; `...` where it continues."""
    line, at = error.doc.split("\n")[error.lineno - 1], error.colno - 1
    start, end = max(0, at - 40), at + 20
    shown = f"{'...' if start else ''}{line[start:end]}{'...' if end < len(line) else ''}"
    ends = ", where the line ends" if at >= len(line) else ""
    return f"{error.msg} at column {error.colno}{ends}: {shown!r}"


def _csv(path: Path) -> Iterator[Record]:
    rows = ((line, cells) for line, cells in read_cells(path) if cells)
    _, header = next(rows, (1, []))
    check_header(path, header)
    for number, (line, cells) in enumerate(rows, 1):
        if len(cells) != len(header):
            raise UserError(
                f"{path}, row {number} (line {line}): {len(cells)} cells under {len(header)} columns "
                f"({listed(header)}); quote cells that hold the delimiter"
            )
        yield Record(str(path), "row", number, dict(zip(header, cells, strict=True)))
