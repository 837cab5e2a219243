"""Reads the rows of a task's files in the formats of the original downloads, which differ from training data.

    .tsv .txt    cells between tabs. A quotation mark is a plain character, as in GLUE's files, unless the file shows
                 that its cells are quoted (../readers.py)
    .csv         quoted cells between commas, semicolons or tabs; a quotation mark that is never closed is refused
    no header    recognised by a first line without any known column, if the task file names the cells (`header`)
    .txt .label  without a tab: the columns `line` and `file` (its name, the label of Subj's sentences); read as
                 Latin-1 if its special characters are not UTF-8 (TREC), which is reported
    .json        a list of rows, or one object with all of them (SQuAD, DROP), which `rows` of the task file expands
    others       as in ../readers.py; .gz for all text formats

A few lines of GLUE's files have a wrong number of cells. They are left out and counted, as is common; a file with more
than one such line in a hundred is refused.

Rows then get the task's own names (`pick_all`), for every known download of a data set:

lists opened     `rows: [data, data.paragraphs]`: the row is repeated for each item of the list at a path, and the
                 item replaces the list. A path that leads to no list is ignored, so that flat rows
                 (Hugging Face's) can use the same task file.
names            `question: [question, passage.questions.question]`: the first that exists; dots lead into
                 objects, unless a column has exactly this name
no label         rows whose label is missing, -1, - or empty (the test sets of benchmarks, MNLI's disputed pairs)
                 are left out and counted; unless the task file lists -1 or - as a label, or its candidates are
                 numbers that begin at -1 or below
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from keyhole.data.opened import (
    MOST_ROW_BYTES,
    TABLES,
    Record,
    Row,
    apart,
    bounded_lines,
    check_header,
    is_packed,
    kind_of,
    open_bytes,
    open_text,
    told,
)
from keyhole.data.readers import load_json, read_cells, rows_of
from keyhole.data.sources import is_saved, read_datasets
from keyhole.data.tasks.spec import TaskSpec
from keyhole.errors import UserError, listed

LINES = (".txt", ".label")
PACKED = (".gz", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst")
MOST_BROKEN = 0.01
MISSING = object()
NO_LABEL = ("", "-", "-1", "none", "null")


def suffix_of(path: Path) -> str:
    """The suffix that determines the reader of a task's file, without .gz; "" for an unknown file type."""
    name = Path(path.stem) if path.suffix.lower() == ".gz" else path
    kind = kind_of(path) if kind_of(path) in TABLES else ""
    return name.suffix.lower() if name.suffix.lower() in LINES else kind


def read_rows(name: str, spec: TaskSpec, left_out: Counter[str]) -> Iterator[Record]:
    """All rows of a file, of a saved data set, or of one of the hub. left_out: counts those that are broken."""
    path = Path(name)
    if os.path.exists(path) and not path.is_file() and not is_saved(path):
        raise UserError(f"{name}: not a regular file but a pipe or a device; copy it into a file")
    if not path.is_file():
        yield from read_datasets(name)
        return
    reader = partial(_file_rows, spec=spec)
    for row in apart(reader, path) if is_packed(path) else reader(path):
        if isinstance(row, Record):
            yield row
        else:
            left_out.update(row)


def _file_rows(path: Path, spec: TaskSpec) -> Iterator[Record | Counter[str]]:
    suffix, names = suffix_of(path), {alias for aliases in spec.columns.values() for alias in aliases}
    with told(path):
        encoding = "latin-1" if latin_line(path) else None
        if suffix in LINES or (suffix == "" and "line" in names and path.suffix.lower() not in PACKED):
            with open_text(path, encoding=encoding) as file:
                if "\t" not in file.readline(MOST_ROW_BYTES):  # one text per line
                    file.seek(0)
                    for number, line in enumerate(bounded_lines(file, path), 1):
                        if line.strip():
                            yield Record(str(path), "line", number, {"line": line.strip(), "file": path.name})
                    return
        if suffix in (".tsv", ".csv", *LINES):
            yield from _cells(path, encoding, spec.header, names)
        elif suffix == ".json" and isinstance(value := load_json(path), dict):
            yield Record(str(path), "item", 1, value)
        else:
            yield from rows_of(path)


def latin_line(path: Path) -> int | None:
    """The first line of a file of lines that is Latin-1, None if the file is UTF-8. A file with both encodings is
    refused: read as Latin-1, every UTF-8 accent would become two characters."""
    if suffix_of(path) not in (*LINES, ""):
        return None  # tables are always UTF-8
    latin, accents = None, False
    with open_bytes(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_ROW_BYTES), b""), 1):
            try:
                accents |= not (line.isascii() or line.decode("utf-8-sig").isascii())
            except UnicodeDecodeError:
                latin = latin or number
            if latin and (accents or b"\0" in line):
                other = "but UTF-16, or no text" if b"\0" in line else "which other lines are"
                raise UserError(f"{path}, line {latin}: not UTF-8 text, {other}; save the file as UTF-8")
    return latin


def _cells(
    path: Path, encoding: str | None, header: tuple[str, ...], known: set[str]
) -> Iterator[Record | Counter[str]]:
    """Rows of cells. header: the task's names of them, for a file without any known column in its first line; `...` at
    its end: more may follow."""
    rows: Iterator[list[str]] = (cells for _, cells in read_cells(path, encoding=encoding, skip_spaces=True))
    names = first = next(rows, [])
    may_go_on = False
    if known & set(first) or not header:
        check_header(path, first)
    else:
        may_go_on, names, rows = "..." in header, [name for name in header if name != "..."], chain([first], rows)
        if len(first) < len(names) or (len(first) > len(names) and not may_go_on):
            raise UserError(
                f"{path}: the first line has none of the columns {listed(sorted(known))}, and {len(first)} cells: a "
                f"file without a header has {len(names)} ({listed(names)})"
            )
    good = broken = 0
    for number, cells in enumerate(rows, 1):
        if len(cells) == len(names) or (may_go_on and len(cells) > len(names)):
            good += 1
            yield Record(str(path), "row", number, dict(zip(names, cells, strict=False)))
        else:
            broken += any(cell.strip() for cell in cells)
    if broken > MOST_BROKEN * (good + broken):
        raise UserError(
            f"{path}: {broken:,} of {good + broken:,} lines do not have {len(names)} cells ({listed(names)}); is the "
            "suffix right, and is a quotation mark inside a quoted cell written twice?"
        )
    yield Counter(broken=broken)


def pick_all(records: Iterable[Record], spec: TaskSpec, left_out: Counter[str]) -> Iterator[Record]:
    """Rows with only the task's columns. left_out: counts rows without a label."""
    column, known = spec.value or "label", {word for words in spec.labels for word in words}
    if spec.value is not None and isinstance(spec.candidates, tuple):
        known |= {"-1"} if any(re.fullmatch(r"\s*-0*[1-9][0-9.]*\s*", text) for text in spec.candidates) else set()
    unlabelled = set(NO_LABEL) - known
    for record in records:
        opened = _opened([record.row], spec.rows)
        for part, row in enumerate(opened, 1):
            picked = pick(replace(record, row=row, part=part if len(opened) > 1 else 0), spec)
            if column in spec.columns and spelled(picked.row[column]) in unlabelled and column not in spec.optional:
                left_out["without a label"] += 1
            else:
                yield picked


def spelled(value: object) -> str:
    """A label as text: true and True are the same, and so are 1, 1.0 and "1"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip().lower()
    return text[:-2] if text.endswith(".0") and text[:-2].removeprefix("-").isdecimal() else text


def lookup(row: object, path: str) -> Any:
    """The value of a column or at a dotted path; MISSING if there is none."""
    if isinstance(row, dict) and path in row:
        return row[path]
    head, dot, rest = path.partition(".")
    return lookup(row[head], rest) if dot and isinstance(row, dict) and head in row else MISSING


def _opened(rows: list[Row], paths: tuple[str, ...]) -> list[Row]:
    for path in paths:
        whole, rows = rows, []
        for row in whole:
            items = list(row.values()) if path == "*" else lookup(row, path)
            if path == "*":
                rows += items if items and all(isinstance(value, dict) for value in items) else [row]
            else:
                rows += [_with(row, path, item) for item in items] if isinstance(items, list) else [row]
    return rows


def _with(row: Row, path: str, item: object) -> Row:
    """A copy of the row with another value at this path."""
    head, _, rest = path.partition(".")
    return {**row, path: item} if path in row else {**row, head: _with(row[head], rest, item)}


def pick(record: Record, spec: TaskSpec) -> Record:
    picked = {}
    for name, aliases in spec.columns.items():
        value = next((found for alias in aliases if (found := lookup(record.row, alias)) is not MISSING), None)
        if value is None and name not in spec.optional and all(lookup(record.row, a) is MISSING for a in aliases):
            also = f" (also called {listed(aliases[1:])})" if len(aliases) > 1 else ""
            nested = all("." in alias for alias in aliases) and not any(
                isinstance(x, dict) for x in record.row.values()
            )
            instead = (
                "It is inside an object, which no cell of a CSV can hold: give JSON rows" if nested else "Rename it"
            )
            raise UserError(
                f"{record.where}: task {spec.name} needs the column {aliases[0]}{also}; found: {listed(record.row)}. "
                f"{instead}, or give its name in the data in `columns: {{{name}: ...}}` of a task file of your own "
                "(docs/tasks.md)"
            )
        picked[name] = value
    return replace(record, row=picked, columns=tuple(record.row) if None in picked.values() else ())
