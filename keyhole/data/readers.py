"""Reads the rows of one file, by its suffix, and refuses broken or hostile files with a clear message.

    .jsonl .ndjson     an object per line                       .csv .tsv     a header, then a row per record
    .json              a list of objects, or JSONL              .parquet      columns; also .arrow (`save_to_disk`)
    .txt .text .md     documents (documents.py)

Text formats may be compressed (.jsonl.gz). delimited.py splits cells and interprets quotation marks.

Rows are yielded one at a time, each with its place in the file, so that every later error can say "train.jsonl, line
17" instead of a bare KeyError. JSONL counts lines, CSV and Parquet count rows from 1 without the header. Keys that
Parquet fills with null inside a nested value, because another row has them, are removed again.

A small file can expand to a lot of data: a Parquet page that repeats one long text, a gzip stream of zeros. So a row
may have at most 16 MiB, which is checked before the row is built; Parquet's texts are read as dictionaries, which store
a repeated text once; and a file that claims a thousand times more data than its size is refused.
"""

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from keyhole.errors import UserError, listed

PLAIN = (".txt", ".text", ".md")
TABLES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
SUFFIXES = (*TABLES, *PLAIN)
MOST_ROW_BYTES = 2**24
MOST_JSON_BYTES = 2**31
MOST_GROWTH, GROWTH_FROM = 1000, 2**28  # factor over its size, checked from this many bytes on
ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Record:
    """One row and where it was found."""

    file: str
    unit: str  # "line", "row" or "item"
    number: int  # counted from 1
    row: dict[str, Any]
    source: int = 0  # index of its source
    part: int = 0  # which of the rows it was expanded into, from 1; 0: it is one row
    is_document: bool = False  # a piece of a plain text, which is longer than a sample
    ends: bool = True  # whether it is the last piece

    @property
    def where(self) -> str:
        return f"{self.file}, {self.unit} {self.number}" + (f", row {self.part} of it" if self.part else "")


def kind_of(path: Path) -> str:
    """The suffix that determines the reader, without .gz; "" for an unknown file type."""
    packed = path.suffix.lower() == ".gz"
    suffix = Path(path.stem).suffix.lower() if packed else path.suffix.lower()
    return suffix if suffix in SUFFIXES and not (packed and suffix in (".parquet", ".arrow")) else ""


def read_file(path: Path) -> Iterator[Record]:
    """The rows of one local file."""
    readers = {".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".arrow": _arrow}
    readers |= dict.fromkeys(PLAIN, _plain)
    reader = readers.get(kind_of(path), _jsonl if kind_of(path) else None)
    if reader is None:
        known = ", ".join(SUFFIXES)
        raise UserError(f"{path}: unknown kind of file {path.suffix!r}; expected one of {known} (text also with .gz)")
    with told(path):
        yield from reader(path)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turns errors while a file is read into a UserError that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{path}{_bad_line(path)}: not UTF-8 text ({error.reason}); save the file as UTF-8") from None
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be unpacked: {error}; the file is damaged or not whole") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Unpacked(io.RawIOBase):
    """A gzip stream that refuses to expand without limit."""

    def __init__(self, path: Path) -> None:
        self.path, self.stream = path, gzip.open(path, "rb")
        self.left = max(GROWTH_FROM // 4, MOST_GROWTH // 4 * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.stream.readinto(buffer)
        self.left -= count
        if self.left < 0:
            raise UserError(
                f"{self.path}: unpacks to far more than text compresses by; unpack it first, and look at it"
            )
        return count

    def close(self) -> None:
        self.stream.close()
        super().close()


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedIOBase]:
    """Opens a file, decompressed if necessary."""
    with io.BufferedReader(_Unpacked(path), 2**16) if path.suffix.lower() == ".gz" else open(path, "rb") as file:
        yield file


@contextmanager
def open_text(path: Path, newline: str | None = None, encoding: str | None = None) -> Iterator[TextIO]:
    """Opens a text file, decompressed if necessary. encoding: None is UTF-8."""
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding or "utf-8-sig", newline=newline) as text:
        yield text


def bounded_lines(file: TextIO, path: Path) -> Iterator[str]:
    """Lines of a bounded length."""
    number = 0
    while line := file.readline(MOST_ROW_BYTES + 1):
        number += 1
        if len(line) > MOST_ROW_BYTES:
            raise UserError(f"{path}, line {number}: longer than {MOST_ROW_BYTES:,} characters; split the row")
        check_line(line, path, number)
        yield line


def check_line(line: str, path: Path, number: int) -> None:
    """Refuses a line that is no text."""
    if "\0" in line:
        raise UserError(
            f"{path}, line {number}: a NUL character, which no text has; the file is damaged, or is UTF-16: "
            "save it as UTF-8"
        )


def _bad_line(path: Path) -> str:
    """The place of the first byte that is not UTF-8 (`, line 17`), or the encoding that the file seems to have."""
    with open_bytes(path) as file:
        number, start = 0, b""
        while line := file.readline(MOST_ROW_BYTES):
            number, start = number + 1, start or line[:2]
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError:
                return " (it looks like UTF-16)" if start in (b"\xff\xfe", b"\xfe\xff") else f", line {number}"
    return ""


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
    extra = isinstance(cause, json.JSONDecodeError) and cause.msg == "Extra data"
    return extra and cause.doc.lstrip().startswith("{")


def _fault(error: json.JSONDecodeError) -> str:
    """What is wrong, in which column of the line, and the text around it; `...` where it continues."""
    line, at = error.doc.split("\n")[error.lineno - 1], error.colno - 1
    start, end = max(0, at - 40), at + 20
    shown = f"{'...' if start else ''}{line[start:end]}{'...' if end < len(line) else ''}"
    ends = ", where the line ends" if at >= len(line) else ""
    return f"{error.msg} at column {error.colno}{ends}: {shown!r}"


def _csv(path: Path) -> Iterator[Record]:
    from keyhole.data.delimited import read_cells

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


def check_header(path: Path, header: list[str]) -> None:
    """Refuses two columns of one name: the rows would have only the second."""
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        named = listed(name or "(no name)" for name in twice)
        raise UserError(f"{path}: two columns are called {named}; rename one, or remove it")


def _parquet(path: Path) -> Iterator[Record]:
    from keyhole.data.columns import read_parquet

    return read_parquet(path)


def _arrow(path: Path) -> Iterator[Record]:
    from keyhole.data.columns import read_arrow

    return read_arrow(path)


def _plain(path: Path) -> Iterator[Record]:
    from keyhole.data.documents import read_documents

    return read_documents(path)
