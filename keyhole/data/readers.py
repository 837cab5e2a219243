"""Reads the rows of one file, by its suffix, and refuses broken or hostile files with a clear message.

    .jsonl .ndjson     an object per line                       .csv .tsv     a header, then a row per record
    .json              a list of objects, or JSONL              .parquet      columns
    .txt .text .md     documents

Text formats may be compressed (.jsonl.gz). opened.py opens a file within bounds. Rows are yielded one at a time, each
with its place in the file, so that every later error can name it. JSONL counts lines, CSV and Parquet count rows from 1
without the header.

A packed file may hold a thousand times its bytes, and pyarrow (arrow.py) may end its process over a damaged one. So
both are read by another process, with limits of time and memory that grow with the file (machine/worker.py), and what
crashes there is a message here. It reads on while this process tokenises.

A plain text file is one *document*, because line breaks do not say where a text begins: in a book they end lines, in a
list they end texts. A line that is only `<|endoftext|>` separates documents. A document is longer than a sample. It is
read in pieces of about a million characters, so a file of any size needs the memory of a piece; collect.py cuts the
tokens of a piece into samples of max_length. A piece ends at an empty line or, if there is none for another million
characters, at the end of a line. So only the last sample of a piece is short, and the tokens at its borders are nearly
always those of the whole text. Empty lines at both ends of a document are removed.

Cells of CSV and TSV, for training data and tasks:

delimiter    .csv: the first of tab, comma, semicolon that the first line has outside of quotation marks
             others: tabs; a .tsv whose first line has commas and no tab is refused as a CSV file
quoting      between commas and semicolons always: "a ""b"", c" is one cell
             between tabs depending on the file, because both kinds are common (`_is_quoted`)
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from keyhole.data.arrow import read_parquet
from keyhole.data.opened import (
    MOST_ROW_BYTES,
    PLAIN,
    SUFFIXES,
    Record,
    apart,
    bounded_lines,
    check_header,
    is_packed,
    kind_of,
    open_text,
    told,
)
from keyhole.errors import UserError, listed

TAB = "\t"
LOOKED_AT = 2**24  # characters of a file that decide whether it is quoted
MOST_JSON_BYTES = 2**31
SEPARATOR = "<|endoftext|>"
PIECE_CHARACTERS = 2**20

Rows = Iterator[tuple[int, list[str]]]


def read_cells(path: Path, *, encoding: str | None = None, skip_spaces: bool = False) -> Rows:
    """The cells of every row, the header too, with the line on which the row begins; no cells for an empty line.
    skip_spaces: spaces after a comma are not part of the cell."""
    with open_text(path, encoding=encoding) as file:
        delimiter = _delimiter(path, file.readline(MOST_ROW_BYTES))
    if delimiter == TAB and not _is_quoted(path, encoding):
        return _plain(path, encoding)
    return _quoted(path, encoding, delimiter, skip_spaces and delimiter != TAB)


def _delimiter(path: Path, first: str) -> str:
    bare = re.sub(r'"[^"]*"', "", first)
    if kind_of(path) == ".csv":
        return next((mark for mark in (TAB, ",", ";") if mark in bare), ",")
    if kind_of(path) == ".tsv" and TAB not in first and any(mark in bare for mark in ",;"):
        found = "commas" if "," in bare else "semicolons"
        raise UserError(f"{path}, line 1: no tab, but {found}: this looks like CSV; rename the file to .csv")
    return TAB


def _plain(path: Path, encoding: str | None) -> Rows:
    """Rows between tabs, where a quotation mark is a letter."""
    with open_text(path, newline="\n", encoding=encoding) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            text = line.rstrip("\r\n")
            yield number, text.split(TAB) if text else []


def _quoted(path: Path, encoding: str | None, delimiter: str, skip_spaces: bool) -> Rows:
    """Rows with quoted cells. Errors name the line on which the row begins."""
    csv.field_size_limit(MOST_ROW_BYTES)  # the default of 128 KiB is shorter than a long document
    with open_text(path, newline="", encoding=encoding) as file:
        rows = csv.reader(bounded_lines(file, path), delimiter=delimiter, skipinitialspace=skip_spaces, strict=True)
        begin = 1
        try:
            for cells in rows:
                yield begin, cells
                begin = rows.line_num + 1
        except csv.Error as error:
            raise UserError(
                f"{path}, line {begin}: not valid CSV: {error}; is a quotation mark of this row never closed? One "
                'inside a quoted cell is written twice ("")'
            ) from None


def _is_quoted(path: Path, encoding: str | None) -> bool:
    """Whether the cells of a file with tabs are quoted, as its first 16 MiB show; a later contradiction is an error of
    that row.

    GLUE's files are written without quoting: a quotation mark is a plain character, and sentences begin with one that
    is never closed. pandas and spreadsheets quote cells that contain a mark, a tab or a line break, and double the
    marks inside. So a file is quoted if its rows, read with quoting, have one number of cells, and something shows it:
    without quoting they do not (or have one cell); all names in the first are quoted; or a cell has doubled marks."""
    rows = _first(_plain(path, encoding))
    widths = {len(row) for row in rows if row}
    doubled = any('""' in cell[1:-1] and _is_whole(cell) for row in rows for cell in row)
    if len(widths) == 1 and widths != {1} and not doubled and not all(map(_is_whole, rows[0])):
        return False
    try:
        return len({len(row) for row in _first(_quoted(path, encoding, TAB, False)) if row}) == 1
    except UserError:
        return False


def _first(rows: Rows) -> list[list[str]]:
    found, seen = [], 0
    for _, cells in rows:
        found.append(cells)
        seen += 1 + sum(map(len, cells))
        if seen > LOOKED_AT:
            break
    return found


def _is_whole(cell: str) -> bool:
    """Whether a cell is quoted, and every mark inside is written twice."""
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")


def read_file(path: Path) -> Iterator[Record]:
    """The rows of one local file; of a packed or binary one by another process."""
    return apart(rows_of, path) if is_packed(path) else rows_of(path)


def rows_of(path: Path) -> Iterator[Record]:
    """The same, in this process."""
    if kind_of(path) not in READERS:
        known = ", ".join(SUFFIXES)
        raise UserError(f"{path}: unknown kind of file {path.suffix!r}; expected one of {known} (text also with .gz)")
    with told(path):
        yield from READERS[kind_of(path)](path)


class _Twice(ValueError):
    """A key occurs twice in an object."""


def parse_json(text: str) -> Any:
    """A JSON value; ValueError for a repeated key, whose second value would silently win."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
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
        wrong = error.doc.split("\n")[error.lineno - 1][max(0, error.colno - 41) : error.colno + 19]
        fault = f"{error.msg} at column {error.colno}, near {wrong!r}"
        raise UserError(f"{path}, line {line or error.lineno}: not valid JSON: {fault}") from error
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        raise UserError(f"{where}: JSON that cannot be read: {what}") from None


def _record(value: object, path: Path, unit: str, number: int) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{path}, {unit} {number}: expected an object with named columns, found {type(value).__name__}")
    return Record(str(path), unit, number, value)


def _jsonl(path: Path) -> Iterator[Record]:
    with open_text(path) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            if line.strip():
                yield _record(_load(line.rstrip(), path, number), path, "line", number)


def load_json(path: Path) -> Any:
    """The JSON value of a file; None if the file is empty, or has one object per line."""
    if (size := path.stat().st_size) > MOST_JSON_BYTES:
        raise UserError(f"{path}: {size:,} bytes in one JSON value; write it as JSONL, an object per line")
    with open_text(path) as file:
        text = file.read()
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
        yield _record(item, path, "item", number)


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
    lines, size, first = list[str](), 0, 0
    with open_text(path) as file:
        for number, line in enumerate(chain(bounded_lines(file, path), [SEPARATOR]), 1):
            blank, ends = not line.strip(), line.strip() == SEPARATOR
            full = size >= 2 * PIECE_CHARACTERS or (size >= PIECE_CHARACTERS and not lines[-1].strip())
            if lines and (ends or (full and not blank)):
                text = "".join(lines)
                row = {"text": text.rstrip("\n") if ends else text}
                yield Record(str(path), "line", first, row, is_document=True, ends=ends)
                lines, size = [], 0
            if not ends and (lines or not blank):  # empty lines before a document are left out
                first = first if lines else number
                lines.append(line)
                size += len(line)


READERS = {
    ".json": _json, ".parquet": read_parquet, **dict.fromkeys(PLAIN, read_documents),
    ".jsonl": _jsonl, ".ndjson": _jsonl, ".csv": _csv, ".tsv": _csv,
}  # fmt: skip
