"""Opens a file of data: its kind by its suffix, unpacked (.gz) and line by line, all within bounds; and what is read of
it: a row with named columns, and its place.

A line may have no end, so a row has at most 16 MiB. Errors while a file is read name the file, and the line if there is
one (`told`).
"""

import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from keyhole.errors import UserError, listed
from keyhole.machine.worker import streamed

PLAIN = (".txt", ".text", ".md")
TABLES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
SUFFIXES = (*TABLES, *PLAIN)
MOST_ROW_BYTES = 2**24

Read = TypeVar("Read")
Row = dict[str, Any]  # by column: whatever a file may hold


@dataclass(frozen=True, slots=True)
class Record:
    file: str
    unit: str  # "line", "row" or "item"
    number: int  # counted from 1
    row: Row
    source: int = 0  # index of its source
    part: int = 0  # which of the rows it was expanded into, from 1; 0: it is one row
    is_document: bool = False  # a piece of a plain text, which is longer than a sample
    ends: bool = True  # whether it is the last piece
    columns: tuple[str, ...] = ()  # those of the data, of a task's row that lacks some

    @property
    def where(self) -> str:
        return f"{self.file}, {self.unit} {self.number}" + (f", row {self.part} of it" if self.part else "")


def kind_of(path: Path) -> str:
    """The suffix that determines the reader, without .gz; "" for an unknown file type."""
    packed = path.suffix.lower() == ".gz"
    suffix = Path(path.stem).suffix.lower() if packed else path.suffix.lower()
    return suffix if suffix in SUFFIXES and not (packed and suffix == ".parquet") else ""


def is_packed(path: Path) -> bool:
    """Whether the file may hold far more than its bytes, or crash the library that reads it."""
    return path.suffix.lower() in (".gz", ".parquet")


def apart(reader: Callable[[Path], Iterator[Read]], path: Path) -> Iterator[Read]:
    """The rows of a file or directory, read by another process; what crashes it, or takes far more than the file is
    large, is a UserError."""
    return streamed(
        reader,
        path,
        f"{path}: the file is damaged, or made to harm: reading it",
        room=sum(each.stat().st_size for each in (path, *path.rglob("*.arrow")) if each.is_file()),
    )


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


def open_bytes(path: Path) -> "gzip.GzipFile | io.BufferedReader":
    return gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb")


def open_text(path: Path, newline: str | None = None, encoding: str | None = None) -> TextIO:
    """Opens a text file, decompressed if necessary. encoding: None is UTF-8."""
    return io.TextIOWrapper(cast(io.BufferedReader, open_bytes(path)), encoding or "utf-8-sig", newline=newline)


def bounded_lines(file: TextIO, path: Path) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(MOST_ROW_BYTES + 1), ""), 1):
        if len(line) > MOST_ROW_BYTES:
            raise UserError(f"{path}, line {number}: longer than {MOST_ROW_BYTES:,} characters; split the row")
        if "\0" in line:
            raise UserError(
                f"{path}, line {number}: a NUL character, which no text has; the file is damaged, or is UTF-16: "
                "save it as UTF-8"
            )
        yield line


def _bad_line(path: Path) -> str:
    """The place of the first byte that is not UTF-8 (`, line 17`), or the encoding that the file seems to have."""
    with open_bytes(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_ROW_BYTES), b""), 1):
            if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
                return " (it looks like UTF-16)"
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError:
                return f", line {number}"
    return ""


def check_header(path: Path, header: list[str]) -> None:
    """Refuses two columns of one name: the rows would have only the second."""
    if twice := [name or "(no name)" for name, count in Counter(header).items() if count > 1]:
        raise UserError(f"{path}: two columns are called {listed(twice)}; rename one, or remove it")


def check_text(text: str, where: str) -> None:
    """Refuses lone surrogates: JSON can escape them, tokenizers cannot read them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: the text has {text[error.start]!a}, half of a character (a lone UTF-16 surrogate), near "
            f"{text[max(0, error.start - 20) : error.start + 20]!a}; write the whole character, or take it out"
        ) from None
