"""Reads CSV and TSV cells, for training data and tasks: finds the delimiter, and decides whether cells are quoted.

    delimiter    .csv: the first of tab, comma, semicolon that the first line has outside of quotation marks
                 a first line `sep=;`, which spreadsheets write, names it, and is no row
                 others: tabs; a .tsv whose first line has commas and no tab is refused as a CSV file
    quoting      between commas and semicolons always: "a ""b"", c" is one cell
                 between tabs depending on the file, because both kinds are common
    line ends    \\n, \\r\\n, or \\r if there is no other

GLUE's files are written without quoting: a quotation mark is a plain character, and sentences begin with one that is
never closed. pandas and spreadsheets quote cells that contain a mark, a tab or a line break, and double the marks
inside. A file with tabs is read as quoted if

    every cell that begins with a mark also closes it, and one of them has doubled marks inside,
    or every cell except numbers is quoted,
    or its lines do not have the same number of cells (or all names in the first are quoted), and read with quoting
    its rows do.

Otherwise, if a cell opens a quote and does not close it, the file is not quoted. If whole cells are in marks and there
is no other evidence, the caller decides (`marks_are_letters`). The first 64 MiB are examined; a later contradiction is
an error of that row.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from keyhole.data.opened import MOST_ROW_BYTES, bounded_lines, kind_of, open_bytes, open_text
from keyhole.errors import UserError

TAB = "\t"
LOOKED_AT = 2**26  # characters of a file that decide whether it is quoted
SEPARATOR = re.compile(r'"?sep=([\t,;|])"?')
NUMBER = re.compile(r"\s*[-+]?[0-9]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?\s*")  # or empty

Rows = Iterator[tuple[int, list[str]]]


def read_cells(
    path: Path, *, encoding: str | None = None, skip_spaces: bool = False, marks_are_letters: bool = False
) -> Rows:
    """The cells of every row, the header too, with the line on which the row begins; no cells for an empty line.
    skip_spaces: spaces after a comma are not part of the cell."""
    with open_bytes(path) as file:
        head = file.read(2**16)
    end = "\r" if b"\r" in head and b"\n" not in head else "\n"
    with open_text(path, newline=end, encoding=encoding) as file:
        first = file.readline(MOST_ROW_BYTES)
    said = SEPARATOR.fullmatch(first.strip("\r\n")) if kind_of(path) == ".csv" else None
    delimiter = _delimiter(path, first) if said is None else said[1]
    if delimiter == TAB and not _is_quoted(path, end, encoding, marks_are_letters):
        rows = _plain(path, end, encoding)
    else:
        rows = _quoted(path, encoding, delimiter, skip_spaces and delimiter != TAB)
    if said is not None:
        next(rows)
    yield from rows


def _delimiter(path: Path, first: str) -> str:
    bare = re.sub(r'"[^"]*"', "", first)
    if kind_of(path) == ".csv":
        return next((mark for mark in (TAB, ",", ";") if mark in bare), ",")
    if kind_of(path) == ".tsv" and TAB not in first and any(mark in bare for mark in ",;"):
        raise UserError(
            f"{path}, line 1: no tab, but {'commas' if ',' in bare else 'semicolons'}: this looks like CSV; rename the "
            "file to .csv"
        )
    return TAB


def _plain(path: Path, end: str, encoding: str | None) -> Rows:
    """Rows between tabs, where a quotation mark is a letter."""
    with open_text(path, newline=end, encoding=encoding) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            text = line.rstrip("\r\n")
            yield number, text.split(TAB) if text else []


def _quoted(path: Path, encoding: str | None, delimiter: str, skip_spaces: bool) -> Rows:
    """Rows with quoted cells. Errors name the line on which the row begins."""
    csv.field_size_limit(MOST_ROW_BYTES)  # the default of 128 KiB is shorter than a long document
    with open_text(path, newline="", encoding=encoding) as file:
        lines = bounded_lines(file, path)
        rows = csv.reader(lines, delimiter=delimiter, skipinitialspace=skip_spaces, strict=True)
        while True:
            begin = rows.line_num + 1
            try:
                cells = next(rows, None)
            except csv.Error as error:
                raise UserError(
                    f"{path}, line {begin}: not valid CSV: {error}; is a quotation mark of this row never closed? One "
                    'inside a quoted cell is written twice ("")'
                ) from None
            if cells is None:
                return
            yield begin, cells


def _is_quoted(path: Path, end: str, encoding: str | None, marks_are_letters: bool) -> bool:
    """Whether the cells of a file with tabs are quoted."""
    marked = broken = doubled = bare = named = False
    widths, seen = set[int](), 0
    for _, cells in _plain(path, end, encoding):
        named = bool(cells) and all(map(_is_whole, cells)) if not seen else named
        widths |= {len(cells)} if cells else set()
        seen += 1 + sum(map(len, cells))
        for cell in cells:
            if cell.startswith('"'):
                whole = _is_whole(cell)
                marked, broken, doubled = True, broken or not whole, doubled or (whole and '""' in cell[1:-1])
            elif not bare:
                bare = NUMBER.fullmatch(cell[:40]) is None
        if seen > LOOKED_AT:
            break
    if not broken:
        return marked and (doubled or not bare or not marks_are_letters)
    return (len(widths) > 1 or widths == {1} or named) and _fits_quoted(path, encoding)


def _is_whole(cell: str) -> bool:
    """Whether a cell is quoted, and every mark inside is written twice."""
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")


def _fits_quoted(path: Path, encoding: str | None) -> bool:
    """Whether all rows have as many cells as the first, read with quoting."""
    width = seen = 0
    try:
        for _, cells in _quoted(path, encoding, TAB, False):
            width, seen = width or len(cells), seen + sum(map(len, cells))
            if len(cells) not in (0, width) or seen > LOOKED_AT:
                return len(cells) in (0, width)
    except UserError:
        return False
    return True
