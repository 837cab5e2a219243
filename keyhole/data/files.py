"""Rows out of files: where the data lies, and what a broken file is told.

A source is a path, a glob, a directory, or a hub id, and a data set is a list of sources:

    data/train.jsonl        one file: .json, .jsonl, .ndjson, .csv, .tsv or .parquet
    data/part-*.parquet     every file that matches, in sorted order
    data/                   every data file directly inside, in sorted order (the report lists them)
    owner/name              a hub data set, split "train"; `owner/name:split` or `owner/name:config:split`

There is no registry. Nothing is fetched unless the source is not on disk and reads like a hub id, and then
only through the optional `datasets` package.

Rows are yielded one at a time, each with the place it came from, because the commonest complaint about data
tools is a bare KeyError: every later error can say "train.jsonl, line 17". JSONL counts lines, CSV and
Parquet count rows from 1 without the header. A `.json` file that holds one object per line is read as
JSONL, since that is what many of them are.
"""

import csv
import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.errors import UserError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
HUB_ID = re.compile(r"((?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(?::([\w.-]+))??(?::([\w.-]+(?:\[[^\]/]*\])?))?")


@dataclass(frozen=True, slots=True)
class Record:
    """One row and where it was found."""

    file: str
    unit: str  # "line", "row" or "item"
    number: int  # counted from 1
    row: dict[str, Any]
    source: int = 0  # which of the sources it came from

    @property
    def where(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def read(source: str | list[str]) -> Iterator[Record]:
    """All rows of all sources, in order. Every source and every file must hold at least one row."""
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise UserError("no data: the list of sources is empty; give a path, a glob, a directory or a hub id")
    for name in resolve(sources):
        records = read_file(Path(name)) if Path(name).is_file() else read_hub(name)
        first = next(records, None)
        if first is None:
            raise UserError(f"{name}: the file holds no rows; remove it from the data or fill it")
        yield first
        yield from records


def resolve(sources: list[str]) -> list[str]:
    """Paths, globs and directories as file names; hub ids pass through. All that is missing is one error."""
    names, missing = [], []
    for source in map(str, sources):
        path = Path(source).expanduser()
        if path.is_file():
            found = [str(path)]
        elif path.is_dir():
            found = sorted(str(p) for p in path.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)
        elif glob.has_magic(source) and not HUB_ID.fullmatch(source):
            found = sorted(p for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        else:
            looks_like_file = path.suffix.lower() in SUFFIXES or not HUB_ID.fullmatch(source)
            found = [] if looks_like_file else [source]
        names += found
        missing += [] if found else [_missing(source, path)]
    if missing:
        raise UserError("\n".join(missing))
    return names


def _missing(source: str, path: Path) -> str:
    if path.is_dir():
        return f"{source}: the directory holds no data file ({', '.join(SUFFIXES)})"
    if glob.has_magic(source):
        return f"{source}: no file matches this pattern (from {Path.cwd()})"
    near = sorted(p.name for p in path.parent.iterdir() if p.suffix in SUFFIXES) if path.parent.is_dir() else []
    hint = f"; {path.parent} holds {', '.join(near[:5])}" if near else ""
    return f"{source}: no such file (from {Path.cwd()}){hint}"


def read_file(path: Path) -> Iterator[Record]:
    """The rows of one local file, by its suffix."""
    readers = {".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
    readers |= {".jsonl": _jsonl, ".ndjson": _jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: unknown kind of file {path.suffix!r}; expected one of {', '.join(SUFFIXES)}")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}); save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _object(value: Any, path: Path, unit: str, number: int) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{path}, {unit} {number}: expected an object with named columns, found {type(value).__name__}")
    return Record(str(path), unit, number, value)


def _jsonl(path: Path) -> Iterator[Record]:
    with open(path, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not valid JSON: {_fault(error)}") from None
            yield _object(value, path, "line", number)


def _json(path: Path) -> Iterator[Record]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        return
    try:
        value = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # one object per line after all
            yield from _jsonl(path)
            return
        raise UserError(f"{path}, line {error.lineno}: not valid JSON: {_fault(error)}") from None
    if not isinstance(value, list):
        keys = f" with keys {', '.join(map(str, value))}" if isinstance(value, dict) else ""
        raise UserError(
            f"{path}: expected a list of rows, found {type(value).__name__}{keys}; "
            "write a list of objects, or one object per line (JSONL)"
        )
    for number, item in enumerate(value, 1):
        yield _object(item, path, "item", number)


def _fault(error: json.JSONDecodeError) -> str:
    """What is wrong, in which column of the line, and the line around it; `...` stands where it goes on."""
    line, at = error.doc.split("\n")[error.lineno - 1], error.colno - 1
    start, end = max(0, at - 40), at + 20
    shown = f"{'...' if start else ''}{line[start:end]}{'...' if end < len(line) else ''}"
    ends = ", where the line ends" if at >= len(line) else ""
    return f"{error.msg} at column {error.colno}{ends}: {shown!r}"


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is shorter than a long document
    with open(path, encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            header = next(rows, [])
            for number, cells in enumerate((r for r in rows if r), 1):
                if len(cells) != len(header):
                    raise UserError(
                        f"{path}, row {number} (line {rows.line_num}): {len(cells)} cells under "
                        f"{len(header)} columns ({', '.join(header)}); quote cells that hold the delimiter"
                    )
                yield Record(str(path), "row", number, dict(zip(header, cells, strict=True)))
        except csv.Error as error:
            raise UserError(f"{path}, line {rows.line_num}: not valid CSV: {error}") from None


def _parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield Record(str(path), "row", number, row)
    except ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file (after row {number}): {error}") from None


def read_hub(name: str) -> Iterator[Record]:
    """The rows of a hub data set: `id`, `id:split` or `id:config:split`."""
    repo, config, split = HUB_ID.fullmatch(name).groups(default=None)
    split = split or "train"
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{name}: no such file or directory (from {Path.cwd()}); to read it as a hub data set: pip install datasets"
        ) from None
    try:
        rows = load_dataset(repo, config, split=split)
    except Exception as error:  # the package raises a dozen unrelated types here, all of them about this name
        raise UserError(f"{name}: cannot load hub data set {repo!r}, split {split!r}: {error}") from None
    for number, row in enumerate(rows, 1):
        yield Record(name, "row", number, row)
