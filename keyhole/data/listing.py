"""What is remarkable about the files that a list of sources names; one line for each, in the report.

The list says `data/` or `part-*.parquet`; which files these are is found on the disk, and a mistake there trains on
other data without any error:

    not read     files of a directory that no reader knows (a .zst beside the .jsonl), and its directories
    incomplete   `train-00002-of-00005.parquet` without all five parts
    twice        a file that two sources name, or one source through two links; a copy of a file under another name
    splits       a directory with files of several splits (train, test), which are all read
    disguised    a .txt file that begins like JSONL or a table: it is trained on as plain text

A directory of plain texts is a data set; beside tables they are notes, which are not read.
"""

import filecmp
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from keyhole.data.opened import PLAIN, SUFFIXES, kind_of, open_text
from keyhole.errors import listed

PART = re.compile(r"(.*?)(\d{3,})-of-(\d{3,})(.*)")
SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation"}
SPLITS |= {"dev": "validation", "eval": "validation"}
SAID_BY_NAME = ("readme", "license", "licence", "changelog", "citation", "notice")
MOST_LINE, HEAD_BYTES = 2**20, 2**12
HEADERS = (
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
    ("text", "label"),
    ("id", "text"),
)
SAVED = ("state.json", "dataset_dict.json")  # `save_to_disk` of `datasets`


def remarks(sources: list[str], names: list[str]) -> list[str]:
    """Lines about these sources, which were resolved to these files."""
    folders = [path for path in (Path(os.path.expanduser(source)) for source in sources) if path.is_dir()]
    plain = [path for path in folders if not any((path / name).is_file() for name in SAVED)]
    return [
        *map_lines(_unread, plain),
        *map_lines(_no_files, plain),
        *map_lines(_splits, plain),
        *_incomplete(names),
        *_twice(names),
        *_disguised(names),
    ]


def map_lines(tell: Callable[[Path], str], folders: list[Path]) -> list[str]:
    """The lines about each directory that has one."""
    return [line for line in map(tell, folders) if line]


def is_hidden(path: Path) -> bool:
    """Whether a file is not meant to be listed: `.part.jsonl`, or `._part.jsonl`, which macOS writes beside a copy."""
    return path.name.startswith(".")


def data_files(folder: Path) -> list[Path]:
    """The data files directly inside a directory: its tables, or if it has none, its plain texts."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and kind_of(path) and not is_hidden(path)]
    tables = [path for path in files if kind_of(path) not in PLAIN]
    return tables or [path for path in files if not path.name.lower().startswith(SAID_BY_NAME)]


def _unread(folder: Path) -> str:
    read = data_files(folder)
    left = [path for path in sorted(folder.iterdir()) if not is_hidden(path) and path not in read]
    files = [path.name for path in left if not path.is_dir() and not _is_no_file(path)]
    others = [name for name in files if not name.lower().startswith(SAID_BY_NAME)]
    others += [f"{path.name}/" for path in left if path.is_dir()]
    texts = any(kind_of(Path(name)) for name in others)
    why = "plain texts are read only where no tables are" if texts else f"only {', '.join(SUFFIXES)}"
    return f"{folder}: not read: {listed(others)} ({why})" if others else ""


def _no_files(folder: Path) -> str:
    names = [path.name for path in sorted(folder.iterdir()) if not is_hidden(path) and _is_no_file(path)]
    why = "a link that leads nowhere, or no regular file"
    return f"{folder}: not read: {listed(names)} ({why})" if names else ""


def _is_no_file(path: Path) -> bool:
    """Whether a path has the name of a data file, and there is nothing to read."""
    return bool(kind_of(path)) and not path.is_file() and not path.is_dir()


def _splits(folder: Path) -> str:
    """A word of a file's name that is the name of a split: `train-00000-of-00001.parquet`, `sst2.test.csv`."""
    files = [path.name for path in data_files(folder)]
    found = {SPLITS[word] for name in files for word in re.split(r"[\W_]+", name.lower()) if word in SPLITS}
    if len(found) < 2:
        return ""
    return (
        f"{folder}: files of {', '.join(sorted(found))} are all read; for one of them write a pattern, such as *train*"
    )


def _incomplete(names: list[str]) -> list[str]:
    """Parts `-i-of-n` of which some are missing; parts are counted from 0 or from 1."""
    groups: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for name in names:
        if match := PART.fullmatch(Path(name).name):
            groups[str(Path(name).parent / match[1]), match[3], match[4]].add(int(match[2]))
    return [
        f"{front}*-of-{count}{end}: only {len(parts):,} of {int(count):,} parts are read"
        for (front, count, end), parts in groups.items()
        if len(parts) < int(count)
    ]


def _twice(names: list[str]) -> list[str]:
    count = Counter(os.path.realpath(name) if Path(name).is_file() else name for name in names)
    again = [f"{Path(name).name} ({number} times)" for name, number in count.items() if number > 1]
    again += [f"{Path(copy).name} (the same as {Path(name).name})" for name, copy in _copies(list(count))]
    return [f"read more than once, so trained on more often: {listed(again)}"] if again else []


def _copies(names: list[str]) -> list[tuple[str, str]]:
    """Pairs of files with the same bytes, or of which one is the other compressed, as their names say. Only files of
    one size that begin alike are compared: there may be very many."""
    sizes = {name: os.path.getsize(name) for name in names if Path(name).is_file()}
    found = [(name, f"{name}.gz") for name in sizes if f"{name}.gz" in sizes]
    often = Counter(sizes.values())
    alike: defaultdict[tuple[int, bytes], list[str]] = defaultdict(list)
    for name, size in sizes.items():
        if size and often[size] > 1:
            others = alike[size, _head(name)]
            first = next((other for other in others if _are_equal(other, name)), None)
            found += [(first, name)] if first is not None else []
            others += [name] if first is None else []
    return found


def _head(name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""  # reading it will report that


def _are_equal(one: str, other: str) -> bool:
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:
        return False  # reading it will report that


def _disguised(names: list[str]) -> list[str]:
    """Plain texts whose first line is that of another format."""
    found = []
    for path in (Path(name) for name in names if kind_of(Path(name)) in PLAIN and Path(name).is_file()):
        try:
            with open_text(path) as file:
                line = file.readline(MOST_LINE).strip()
        except (OSError, EOFError, ValueError, zlib.error):
            continue  # reading it will report that
        cells = {cell.strip('" ') for cell in re.split(r"[\t,;]", line)}
        if line.startswith("{") and line.endswith("}"):
            found.append(f"{path.name}: begins with a JSON object, and is trained on as plain text; call it .jsonl")
        elif len(cells) > 1 and any(cells >= set(columns) for columns in HEADERS):
            found.append(f"{path.name}: begins with names of columns, and is trained on as plain text; call it .csv")
    return found
