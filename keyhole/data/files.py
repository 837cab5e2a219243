"""Where the data are: resolves sources to files, and reads the rows of all of them.

A source is a path, a glob, a directory, or a hub id, and a data set is a list of sources:

    data/train.jsonl        one file (readers.py lists the formats)
    data/part-*.parquet     every file that matches, in sorted order
    data/                   every data file directly inside that is not hidden, in sorted order (the report lists them,
                            and what is not read: listing.py), plain texts only if there is nothing else; a directory
                            that `save_to_disk` of `datasets` wrote is read as a data set (split "train")
    owner/name              a hub data set, split "train"; `owner/name:split` or `owner/name:config:split`

There is no registry. Nothing is downloaded unless the source is not on disk and looks like a hub id, and then only
through the optional `datasets` package. Only regular files are read: a pipe or a device may be endless.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from keyhole.data.listing import data_files
from keyhole.data.opened import SUFFIXES, kind_of
from keyhole.data.readers import read_file
from keyhole.data.record import Record
from keyhole.disk.json_text import read_json
from keyhole.errors import UserError, listed, printable

__all__ = ["SUFFIXES", "Record", "read", "read_file", "resolve"]

HUB_ID = re.compile(r"((?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(?::([\w.-]+))??(?::([\w.-]+(?:\[[^\]/]*\])?))?")


def read(source: str | list[str]) -> Iterator[Record]:
    """All rows of all sources, in order. Every source and every file must have at least one row."""
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise UserError("no data: the list of sources is empty; give a path, a glob, a directory or a hub id")
    resolve(sources)  # reports all missing files before anything is read
    for index, name in ((i, name) for i, given in enumerate(sources) for name in resolve([given])):
        records = read_file(Path(name)) if Path(name).is_file() else read_hub(name)
        first = next(records, None)
        if first is None:
            raise no_rows(name)
        yield replace(first, source=index)
        yield from records if index == 0 else (replace(record, source=index) for record in records)


def no_rows(name: str) -> UserError:
    """The error for a file without rows."""
    return UserError(f"{name}: the file holds no rows; remove it from the data or fill it")


def resolve(sources: list[str]) -> list[str]:
    """Paths, globs and directories as file names; hub ids are left unchanged. One error names all missing files."""
    names, missing = [], []
    for source in map(str, sources):
        path = Path(os.path.expanduser(source))
        try:
            found = _found(source, path)
            missing += [] if found else [_missing(source, path)]
        except OSError as error:  # a name that is too long, a directory without read permission
            found = []
            missing.append(f"{printable(source, 200)}: cannot be read: {error.strerror or error}")
        names += found
    if missing:
        raise UserError("\n".join(missing))
    return names


def _found(source: str, path: Path) -> list[str]:
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            return saved_files(path)
        return saved_files(path) or [str(file) for file in data_files(path)]
    if path.exists():
        return []
    if glob.has_magic(source) and not HUB_ID.fullmatch(source):
        return sorted(p for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    return [] if kind_of(path) or not HUB_ID.fullmatch(source) else [source]


def saved_files(path: Path) -> list[str]:
    """The files of a data set that `save_to_disk` wrote, in its order; none if it is no such directory."""
    path = path / "train" if (path / "dataset_dict.json").is_file() and (path / "train").is_dir() else path
    try:
        state = read_json(path / "state.json", "data")
        files = [path / Path(part["filename"]).name for part in state["_data_files"]]
    except (UserError, KeyError, TypeError) as error:
        if not all((path / name).is_file() for name in ("state.json", "dataset_info.json")):
            return []  # no such directory
        why = error if isinstance(error, UserError) else f"{path / 'state.json'}: names no data files"
        raise UserError(f"{why}; it belongs to a saved data set: copy it again") from None
    if gone := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{path}: a saved data set without {listed(gone)}, which its state.json names; copy it again")
    if state.get("_indices_files"):
        raise UserError(
            f"{path}: a saved data set that selects rows by an index; save it again: flatten_indices() first"
        )
    return [str(file) for file in files]


def _missing(source: str, path: Path) -> str:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        return f"{source}: a saved data set without a split `train`; name one of its directories: {listed(splits)}"
    if path.is_dir():
        inside = only_files(path.iterdir())
        held = listed([f"{p.name}/" if p.is_dir() else p.name for p in sorted(path.iterdir())], 5)
        held = f"; it holds {held}" if held and not inside else ""
        return f"{source}: a directory that holds no data file ({', '.join(SUFFIXES)}){inside}{held}"
    if path.exists():
        return f"{source}: not a regular file but a pipe or a device, which may have no end; copy it into a file"
    if glob.has_magic(source):
        matched = only_files(map(Path, glob.glob(str(path), recursive=True)))
        return f"{source}: no file matches this pattern (from {Path.cwd()}){matched}"
    if path.is_symlink():
        return f"{source}: a link to {os.readlink(path)}, which leads to no file"
    near = sorted(p.name for p in path.parent.iterdir() if kind_of(p)) if path.parent.is_dir() else []
    hint = f"; {path.parent} holds {listed(near, 5)}" if near else ""
    return f"{source}: no such file (from {Path.cwd()}){hint}"


def only_files(paths: Iterable[Path]) -> str:
    """A note about directories that are named like a data file; empty if there are none."""
    named = sorted(path.name for path in paths if kind_of(path) and path.is_dir())
    return f"; directories, not files, are called {listed(named)}" if named else ""


def read_hub(name: str) -> Iterator[Record]:
    """The rows of a hub data set: `id`, `id:split` or `id:config:split`."""
    parts = HUB_ID.fullmatch(name)
    assert parts is not None  # as is_hub_id has seen
    repo, config, split = parts.groups(default=None)
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
    from keyhole.data.columns import nested

    for number, row in enumerate(rows, 1):
        yield Record(name, "row", number, {key: nested(value) for key, value in row.items()})
