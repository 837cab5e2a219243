"""Reads the rows of a task's files in the formats of the original downloads, which differ from training data.

    .tsv .txt    cells between tabs. A quotation mark is a plain character, as in GLUE's files, unless the file shows
                 that its cells are quoted (../delimited.py)
    .csv         quoted cells between commas, semicolons or tabs; a quotation mark that is never closed is refused
    no header    recognised by a first line without any known column, if the task file names the cells (`header`)
    .txt .label  without a tab: the columns `line` and `file` (its name, the label of Subj's sentences); read as
                 Latin-1 if its special characters are not UTF-8 (TREC), which is reported
    .json        a list of rows, or one object with all of them (SQuAD, DROP), which `rows` of the task file expands
    others       as in ../readers.py; .gz for all text formats

A few lines of GLUE's files have a wrong number of cells. They are left out and counted, as is common; a file with more
than one such line in a hundred is refused.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from keyhole.data.delimited import read_cells
from keyhole.data.opened import MOST_ROW_BYTES, TABLES, bounded_lines, kind_of, open_bytes, open_text, told
from keyhole.data.readers import is_lines, load_json, read_file
from keyhole.data.record import Record, check_header
from keyhole.data.tasks.spec import TaskSpec
from keyhole.errors import UserError, listed

LINES = (".txt", ".label")
PACKED = (".gz", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst")
MOST_BROKEN = 0.01


def suffix_of(path: Path) -> str:
    """The suffix that determines the reader of a task's file, without .gz; "" for an unknown file type."""
    name = Path(path.stem) if path.suffix.lower() == ".gz" else path
    kind = kind_of(path) if kind_of(path) in TABLES else ""
    return name.suffix.lower() if name.suffix.lower() in LINES else kind


def read_rows(path: Path, spec: TaskSpec, left_out: Counter[str]) -> Iterator[Record]:
    """All rows of a file. left_out: counts those that are broken."""
    with told(path):
        yield from _rows(path, spec, left_out)


def _rows(path: Path, spec: TaskSpec, left_out: Counter[str]) -> Iterator[Record]:
    suffix = suffix_of(path)
    if _is_lines(path, spec) and "\t" not in _first_line(path):
        return _lines(path)
    if suffix in (".tsv", ".csv", *LINES):
        return _cells(path, spec, left_out)
    return _json(path) if suffix == ".json" else read_file(path)


def _is_lines(path: Path, spec: TaskSpec) -> bool:
    """Whether a file has one text per line: by its suffix, or because the task reads lines and names such a file."""
    named = any("line" in aliases for aliases in spec.columns.values()) and path.suffix.lower() not in PACKED
    return suffix_of(path) in LINES or (named and suffix_of(path) == "")


def _json(path: Path) -> Iterator[Record]:
    try:
        value = load_json(path)
    except UserError as error:
        if not is_lines(error):
            raise
        value = None
    if isinstance(value, dict):
        yield Record(str(path), "item", 1, value)
    else:
        yield from read_file(path)


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
                if b"\0" in line:
                    raise UserError(
                        f"{path}, line {latin}: not UTF-8 text but UTF-16, or no text; save it as UTF-8"
                    ) from None
            if latin and accents:
                raise UserError(f"{path}, line {latin}: not UTF-8 text, which other lines are; save the file as UTF-8")
    return latin


def _encoding(path: Path) -> str | None:
    return "latin-1" if latin_line(path) else None


def _first_line(path: Path) -> str:
    with open_text(path, encoding=_encoding(path)) as file:
        return file.readline(MOST_ROW_BYTES)


def _lines(path: Path) -> Iterator[Record]:
    with open_text(path, encoding=_encoding(path)) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            if line.strip():
                yield Record(str(path), "line", number, {"line": line.strip(), "file": path.name})


def _cells(path: Path, spec: TaskSpec, left_out: Counter[str]) -> Iterator[Record]:
    found = read_cells(path, encoding=_encoding(path), skip_spaces=True, marks_are_letters=True)
    rows = (cells for _, cells in found)
    first = next(rows, [])
    names, may_go_on = _names(path, first, spec)
    good = broken = 0
    for number, cells in enumerate(chain([first] if names is not first else [], rows), 1):
        if len(cells) == len(names) or (may_go_on and len(cells) > len(names)):
            good += 1
            yield Record(str(path), "row", number, dict(zip(names, cells, strict=False)))
        elif any(cell.strip() for cell in cells):
            broken += 1
    left_out["broken"] += broken
    if broken > MOST_BROKEN * (good + broken):
        raise UserError(
            f"{path}: {broken:,} of {good + broken:,} lines do not have {len(names)} cells ({listed(names)}); is the "
            "suffix right, and is a quotation mark inside a quoted cell written twice?"
        )


def _names(path: Path, first: list[str], spec: TaskSpec) -> tuple[list[str], bool]:
    """The names of the cells: the first line itself, or the task's if the first line is already a row; and whether
    rows may have further cells (`...` at the end of `header`)."""
    known = {alias for aliases in spec.columns.values() for alias in aliases}
    if known & set(first) or not spec.header:
        check_header(path, first)
        return first, False
    may_go_on = spec.header[-1] == "..."
    header = list(spec.header[:-1] if may_go_on else spec.header)
    if len(first) == len(header) or (may_go_on and len(first) > len(header)):
        return header, may_go_on
    raise UserError(
        f"{path}: the first line has none of the columns {listed(sorted(known))}, and {len(first)} cells: a file "
        f"without a header has {len(header)} ({listed(header)})"
    )
