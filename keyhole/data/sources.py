"""Where the data are: from sources to files, to rows with their places; and what is checked before torch is imported.

A source is a path, a glob, a directory, or a hub id, and a data set is a list of sources:

    data/train.jsonl        one file (readers.py lists the formats)
    data/part-*.parquet     every file that matches, in sorted order
    data/                   every data file directly inside that is not hidden, in sorted order, plain texts only if
                            there is nothing else; a directory that `save_to_disk` of `datasets` wrote is read by it
                            (split "train")
    owner/name              a hub data set, split "train"; `owner/name:split` or `owner/name:config:split`

There is no registry. Nothing is downloaded unless the source is not on disk and looks like a hub id, and then only
through the optional `datasets` package. Only regular files are read: a pipe or a device may be endless.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from keyhole.data.arrow import nested, read_saved
from keyhole.data.examples import example_of, layout_of, with_columns
from keyhole.data.opened import PLAIN, SUFFIXES, Record, apart, kind_of
from keyhole.data.readers import read_file
from keyhole.data.settings import DataSettings
from keyhole.errors import UserError, listed, printable
from keyhole.machine.worker import streamed

HUB_ID = re.compile(r"((?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(?::([\w.-]+))??(?::([\w.-]+(?:\[[^\]/]*\])?))?")
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation")
SAID_BY_NAME = ("readme", "license", "licence", "changelog", "citation", "notice")
BY_LINE = (".jsonl", ".ndjson", ".csv")  # the first row takes as long in a file of any size
WHOLE, WHOLE_BYTES = (".json", ".tsv"), 2**20  # the reader looks at more of the file


def check_sources(settings: DataSettings) -> None:
    """Refuses missing files, patterns and folders, first rows that cannot be trained on, unknown tasks, and a loss that
    a task does not support, within milliseconds: the usual mistakes about data."""
    given = [source for source in (settings.train_data, settings.eval_data) if source]
    files = [name for source in given for name in resolve([source] if isinstance(source, str) else source)]
    _ = settings.template_text
    for path in filter(Path.is_file, map(Path, files)):
        if kind_of(path) in BY_LINE or (kind_of(path) in WHOLE and path.stat().st_size <= WHOLE_BYTES):
            record = with_columns(next(read(str(path))), settings.columns, settings.row_templates)
            example_of(record, layout_of(record, settings.data_format, settings.row_templates)[0])
    if settings.task or settings.test_task:
        from keyhole.data.tasks.parse import read_spec
        from keyhole.data.tasks.places import find_splits
        from keyhole.data.tasks.spec import check_loss, check_names, listed_names

        train, test = listed_names(settings.task), listed_names(settings.test_task)
        check_names([*train, *test], settings.task_splits)
        for name in (*train, *test):
            spec = read_spec(name)
            if name in train:
                check_loss(spec, settings.loss)
            find_splits(spec, settings.task_data, settings.task_splits)


def read(source: str | list[str]) -> Iterator[Record]:
    """All rows of all sources, in order. Every source and every file must have at least one row."""
    sources = [source] if isinstance(source, str | Path) else list(source)
    resolve(sources)  # reports all missing files before anything is read
    for index, name in ((i, name) for i, given in enumerate(sources) for name in resolve([given])):
        records = read_file(Path(name)) if Path(name).is_file() else read_datasets(name)
        empty = True
        for record in records:
            empty = False
            yield replace(record, source=index)
        if empty:
            raise UserError(f"{name}: the file holds no rows; remove it from the data or fill it")


def resolve(sources: list[str]) -> list[str]:
    """Paths, globs and directories as file names; saved data sets and hub ids are left unchanged. One error names all
    missing files."""
    names, missing = [], []
    for source in map(str, sources):
        path = Path(os.path.expanduser(source))
        try:
            if found := _found(source, path):
                names += found
            else:
                missing.append(_missing(source, path))
        except OSError as error:  # a name that is too long, a directory without read permission
            missing.append(f"{printable(source, 200)}: cannot be read: {error.strerror or error}")
    if missing:
        raise UserError("\n".join(missing))
    return names


def _found(source: str, path: Path) -> list[str]:
    if path.is_file() or is_saved(path):
        return [str(path)]
    if path.exists():
        return [str(file) for file in _data_files(path)] if path.is_dir() else []
    is_id = HUB_ID.fullmatch(source)
    if glob.has_magic(source) and not is_id:
        return sorted(streamed(_matching, str(path), f"{printable(source, 200)}: a search of all that matches"))
    return [source] if is_id and not kind_of(path) else []


def _matching(pattern: str) -> Iterator[str]:
    return (found for found in glob.iglob(pattern, recursive=True) if os.path.isfile(found))


def is_saved(path: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote this directory."""
    return any(os.path.exists(path / name) for name in ("dataset_dict.json", "state.json"))


def _data_files(folder: Path) -> list[Path]:
    """The data files directly inside a directory: its tables, or if it has none, its plain texts. Hidden files are not
    meant to be listed (`._part.jsonl`, which macOS writes beside a copy)."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and kind_of(path) and path.name[0] != "."]
    tables = [path for path in files if kind_of(path) not in PLAIN]
    return tables or [path for path in files if not path.name.lower().startswith(SAID_BY_NAME)]


def _missing(source: str, path: Path) -> str:
    if path.is_dir():
        held = listed(names_in(sorted(path.iterdir())), 5)
        holds = f"; it holds {held}" if held else ""
        return f"{source}: a directory that holds no data file ({', '.join(SUFFIXES)}){holds}"
    if path.exists():
        return f"{source}: not a regular file but a pipe or a device, which may have no end; copy it into a file"
    if glob.has_magic(source):
        return f"{source}: no file matches this pattern (from {Path.cwd()})"
    near = sorted(p.name for p in path.parent.iterdir() if kind_of(p)) if path.parent.is_dir() else []
    return f"{source}: no such file (from {Path.cwd()})" + (f"; {path.parent} holds {listed(near, 5)}" if near else "")


def names_in(paths: list[Path]) -> list[str]:
    """Names of files, and of directories with a slash."""
    return [f"{path.name}/" if path.is_dir() else path.name for path in paths]


def read_datasets(name: str) -> Iterator[Record]:
    """The rows of a saved data set, or of one of the hub (`id`, `id:split` or `id:config:split`)."""
    if Path(name).is_dir():
        yield from apart(read_saved, Path(name))
        return
    parts = HUB_ID.fullmatch(name)
    repo, config, split = (name, None, None) if parts is None else parts.groups(default=None)
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{name}: no such file or directory (from {Path.cwd()}); to read it with `datasets`: pip install datasets"
        ) from None
    try:
        rows = datasets.load_dataset(repo, config, split=split or "train")
    except Exception as error:  # the package raises a dozen unrelated types here, all of them about this name
        raise UserError(f"{name}: cannot load data set {repo!r}, split {split or 'train'!r}: {error}") from None
    for number, row in enumerate(rows, 1):
        yield Record(name, "row", number, {key: nested(value) for key, value in row.items()})


def remarks(sources: list[str], names: list[str]) -> list[str]:
    """What is odd about these sources, which were resolved to these files: what is not read of a directory, files of
    several splits in one, and files that are read twice."""
    found = []
    for folder in (Path(os.path.expanduser(source)) for source in sources):
        if folder.is_dir() and not is_saved(folder):
            read = _data_files(folder)
            others = names_in([path for path in sorted(folder.iterdir()) if path not in read and path.name[0] != "."])
            others = [name for name in others if not name.lower().startswith(SAID_BY_NAME)]
            why = f"only {', '.join(SUFFIXES)}, and plain texts only where no tables are"
            found += [f"{folder}: not read: {listed(others)} ({why})"] if others else []
            words = {word for path in read for word in re.split(r"[\W_]+", path.name.lower())}
            if len(splits := sorted({SPLITS[word] for word in words if word in SPLITS})) > 1:
                told = "are all read; for one of them write a pattern, such as *train*"
                found.append(f"{folder}: files of {', '.join(splits)} {told}")
    times = Counter(os.path.realpath(name) if Path(name).is_file() else name for name in names)
    if again := [f"{Path(name).name} ({number} times)" for name, number in times.items() if number > 1]:
        found.append(f"read more than once, so trained on more often: {listed(again)}")
    return found
