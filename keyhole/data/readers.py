"""Reads the rows of one file, by its suffix, and refuses broken or hostile files with a clear message.

    .jsonl .ndjson     an object per line                       .csv .tsv     a header, then a row per record
    .json              a list of objects, or JSONL              .parquet      columns (parquet.py)
    .txt .text .md     documents

Text formats may be compressed (.jsonl.gz). opened.py opens a file within bounds; delimited.py splits cells and
interprets quotation marks. Rows are yielded one at a time, each with its place in the file, so that every later error
can say "train.jsonl, line 17" instead of a bare KeyError. JSONL counts lines, CSV and Parquet count rows from 1 without
the header.

A plain text file is one *document*, because line breaks do not say where a text begins: in a book they end lines, in a
list they end texts. A line that is only `<|endoftext|>` separates documents, as in published collections of short
texts. A document is longer than a sample. It is read in pieces of about a million characters, so a file of any size
needs the memory of a piece; collect.py cuts the tokens of a piece into samples of max_length. A piece ends at an empty
line or, if there is none for another million characters, at the end of a line; a longer line is divided at a space. So
only the last sample of a piece is short, and the tokens at its borders are nearly always those of the whole text. The
end token follows the last piece of a document. Empty lines at both ends of a document are removed.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from keyhole.data.delimited import read_cells
from keyhole.data.opened import (
    PLAIN,
    SUFFIXES,
    Record,
    bounded_lines,
    check_header,
    check_line,
    kind_of,
    open_text,
    told,
)
from keyhole.data.parquet import read_parquet
from keyhole.errors import UserError, listed

MOST_JSON_BYTES = 2**31
SEPARATOR = "<|endoftext|>"
PIECE_CHARACTERS = 2**20


def read_file(path: Path) -> Iterator[Record]:
    """The rows of one local file."""
    readers = {
        ".json": _json,
        ".csv": _csv,
        ".tsv": _csv,
        ".parquet": read_parquet,
        ".jsonl": _jsonl,
        ".ndjson": _jsonl,
    }
    reader = (readers | dict.fromkeys(PLAIN, read_documents)).get(kind_of(path))
    if reader is None:
        known = ", ".join(SUFFIXES)
        raise UserError(f"{path}: unknown kind of file {path.suffix!r}; expected one of {known} (text also with .gz)")
    with told(path):
        yield from reader(path)


def _object(value: object, path: Path, unit: str, number: int) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{path}, {unit} {number}: expected an object with named columns, found {type(value).__name__}")
    return Record(str(path), unit, number, value)


class _Twice(ValueError):
    """A key occurs twice in an object."""


def parse_json(text: str) -> Any:
    """A JSON value; ValueError for a repeated key, whose second value would silently win."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise _Twice(json.dumps(twice))
        return found

    return json.loads(text, object_pairs_hook=once)


def _load(text: str, path: Path, line: int | None) -> Any:
    """Parses JSON, or raises an error that says what is wrong; line: the line of the file, if the text is one line."""
    where = f"{path}{f', line {line}' if line else ''}"
    try:
        return parse_json(text)
    except _Twice as error:
        raise UserError(f"{where}: the key {error} stands twice in one object") from None
    except json.JSONDecodeError as error:
        wrong, at = error.doc.split("\n")[error.lineno - 1], error.colno - 1
        start, end = max(0, at - 40), at + 20
        shown = f"{'...' if start else ''}{wrong[start:end]}{'...' if end < len(wrong) else ''}"
        ends = ", where the line ends" if at >= len(wrong) else ""
        fault = f"{error.msg} at column {error.colno}{ends}: {shown!r}"
        raise UserError(f"{path}, line {line or error.lineno}: not valid JSON: {fault}") from error
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise UserError(f"{where}: JSON that cannot be read: {what}") from None


def _jsonl(path: Path) -> Iterator[Record]:
    with open_text(path) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            if line.strip():
                yield _object(_load(line.rstrip(), path, number), path, "line", number)


def load_json(path: Path) -> Any:
    """The JSON value of a file; None if the file is empty, or has one object per line."""
    if path.stat().st_size > MOST_JSON_BYTES:
        raise UserError(
            f"{path}: {path.stat().st_size:,} bytes in one JSON value; write it as JSONL, an object per line"
        )
    with open_text(path) as file:
        text = file.read(MOST_JSON_BYTES)
    try:
        return _load(text.rstrip(), path, None) if text.strip() else None
    except UserError as error:
        lines = isinstance(error.__cause__, json.JSONDecodeError) and error.__cause__.msg == "Extra data"
        if lines and text.lstrip().startswith("{"):
            return None
        raise


def _json(path: Path) -> Iterator[Record]:
    value = load_json(path)
    if value is None:
        yield from _jsonl(path)
    elif not isinstance(value, list):
        keys = f" with keys {listed(value)}" if isinstance(value, dict) else ""
        raise UserError(
            f"{path}: expected a list of rows, found {type(value).__name__}{keys}; "
            "write a list of objects, or one object per line (JSONL)"
        )
    for number, item in enumerate(value or (), 1):
        yield _object(item, path, "item", number)


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


def read_documents(path: Path) -> Iterator[Record]:
    """The pieces of all documents of a file, as rows with the column `text`."""
    held: Record | None = None  # a piece that may be the last of its document
    with open_text(path) as file:
        for number, text in _pieces(file, path):
            if text is None:
                yield from [_closed(held)] if held else []
                held = None
            elif held and not text.strip():
                held.row["text"] += text
            elif text.strip():
                yield from [held] if held else []
                text = text if held else text.lstrip("\n")
                held = Record(str(path), "line", number, {"text": text}, is_document=True, ends=False)
    yield from [_closed(held)] if held else []


def _closed(last: Record) -> Record:
    return replace(last, row={"text": last.row["text"].rstrip("\n")}, ends=True)


def _pieces(file: TextIO, path: Path) -> Iterator[tuple[int, str | None]]:
    """The number of a piece's first line, and its text; None as a text where a document ends."""
    lines: list[str] = []
    size = first = 0
    for number, line in _lines(file, path):
        separates = line.strip() == SEPARATOR
        if not separates:
            first = number if not lines else first
            lines.append(line)
            size += len(line)
        if separates or size >= 2 * PIECE_CHARACTERS or (size >= PIECE_CHARACTERS and not line.strip()):
            yield first, "".join(lines)
            lines, size = [], 0
        if separates:
            yield number, None
    yield first, "".join(lines)


def _lines(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; a line longer than a piece in parts, which begin with the space between two words."""
    number, left = 1, ""
    while part := file.readline(PIECE_CHARACTERS):
        check_line(part, path, number)
        line, left = left + part, ""
        if not line.endswith("\n") and len(part) == PIECE_CHARACTERS:
            at = line.rfind(" ", 1)
            line, left = (line[:at], line[at:]) if at > 0 else (line, "")
        yield number, line
        number += line.endswith("\n")
    if left:
        yield number, left
