"""Where the rows of a task lie: `<task>/` under the setting `task_data`, or a data set of the hub.

    task_data/sst2/train.tsv, task_data/SST-2/dev.tsv      the folder by the task's name; case, - and _ do not matter
    task_data/train.tsv                                    the folder itself, where it holds no folder of that name

A split is a name and perhaps a slice: `train`, `validation`, `val[:2270]`, `val[-1000:]`. A name is found as, in this
order,

    the very name          train.jsonl, a folder train/, or with its suffix: val.jsonl[:2270]
    its parts              train-00000-of-00002.parquet
    a version or prefix    train-v1.1.json, drop_dataset_train.json

and validation is also called val, valid and dev. Without `task_data` the hub is asked, through `datasets`.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from keyhole.assets import TRAIN
from keyhole.data.files import only_files, read_hub
from keyhole.data.readers import Record
from keyhole.data.tasks.columns import pick_all
from keyhole.data.tasks.spec import TaskSpec
from keyhole.data.tasks.tables import read_rows, suffix_of
from keyhole.errors import UserError, listed

SAME = {"train": ("train", "training"), "validation": ("validation", "val", "valid", "dev")}
SLICE = re.compile(r"([^\[\]\0]{1,200})(?:\[(-?[0-9]{0,15}):(-?[0-9]{0,15})\])?")


@dataclass(frozen=True)
class Split:
    """The files (or the hub id) of a split, and the slice of their rows."""

    names: tuple[str, ...]
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        files = listed([Path(name).name for name in self.names], 3)
        low, high = ("" if n is None else n for n in (self.start, self.stop))
        return f"{files}[{low}:{high}]" if (self.start, self.stop) != (None, None) else files


def find_splits(spec: TaskSpec, task_data: str | None, given: dict[str, str] | None = None) -> dict[str, Split]:
    """The splits train, test and perhaps dev of a task. given: names instead of the task's own (task_splits)."""
    if task_data is None and spec.name == "demo":
        task_data = str(TRAIN.parent)
    if task_data is None:
        return _hub_splits(spec, given or {})
    folder = _folder(spec, Path(os.path.expanduser(task_data)))
    layouts = [{**layout, **{split: (name,) for split, name in (given or {}).items()}} for layout in spec.splits]
    tried = []
    for layout in layouts:
        found = {split: _find(folder, names) for split, names in layout.items()}
        if all(found.values()):
            return found
        tried.append(", ".join(f"{split}: {listed(layout[split])}" for split, place in found.items() if not place))
    if "train" not in (given or {}):  # enough to be judged by
        for layout in layouts:
            if test := _find(folder, layout["test"]):
                return {"test": test}
    holds = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    raise UserError(
        f"task_data: {folder} has no file for {' or for '.join(dict.fromkeys(tried))}; it holds {listed(holds)}"
        f"{only_files(folder.iterdir())}. "
        "Name the files by split (train.jsonl, validation.tsv, ...), or say which are which: "
        'task_splits: {train: "val[:2270]", test: "val[2270:]"}'
    )


def read_split(spec: TaskSpec, split: Split, left_out: Counter[str]) -> list[Record]:
    """The labelled rows of a split, with the task's columns. left_out: counts the others."""
    return list(pick_all(_rows(spec, split, left_out), spec, left_out))[split.start : split.stop]


def _rows(spec: TaskSpec, split: Split, left_out: Counter[str]) -> Iterator[Record]:
    for name in split.names:
        if os.path.exists(name) and not os.path.isfile(name):
            raise UserError(f"{name}: not a regular file but a pipe or a device; copy it into a file")
        yield from read_rows(Path(name), spec, left_out) if Path(name).is_file() else read_hub(name)


def _plain(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())


def _folder(spec: TaskSpec, root: Path) -> Path:
    if not os.path.isdir(root):
        raise UserError(f"task_data: {root}: no such directory (from {Path.cwd()})")
    wanted = [_plain(name) for name in (spec.name, *spec.folders)]
    inside = [path for path in sorted(root.iterdir()) if path.is_dir()]
    found = [path for name in wanted for path in inside if _plain(path.name) == name]
    if found:
        return found[0]
    if any(suffix_of(path) for path in root.iterdir() if path.is_file()):
        return root
    names = listed([path.name for path in inside]) or "no folder"
    raise UserError(
        f"task_data: {root} has no folder {spec.name}/ with the files of task {spec.name}; it holds {names}"
    )


def _find(folder: Path, names: tuple[str, ...]) -> Split | None:
    """The first of the names that is there."""
    for name in names:
        base, start, stop = _parts(name)
        for word in SAME.get(base.lower(), (base,)):
            if files := _files(folder, word):
                return Split(tuple(map(str, files)), start, stop)
    return None


def _parts(name: str) -> tuple[str, int | None, int | None]:
    match = SLICE.fullmatch(name)
    if match is None:
        raise UserError(f"splits: found {name!r:.80}, expected a name such as validation, or a part of it: val[:2270]")
    return match[1], *(int(n) if n not in (None, "", "-") else None for n in match.groups()[1:])


def _files(folder: Path, word: str) -> list[Path]:
    if os.path.isfile(folder / word):
        return [folder / word]
    if os.path.isdir(folder / word):
        return sorted(path for path in (folder / word).iterdir() if suffix_of(path) and not path.is_dir())
    files = sorted(path for path in folder.iterdir() if suffix_of(path) and not path.is_dir())
    stems = {path: path.name.lower().removesuffix(".gz") for path in files}
    stems = {path: name.removesuffix(suffix_of(path)) for path, name in stems.items()}
    own = re.escape(word.lower())
    for pattern in (own, rf"{own}[-_.]\d+(-of-\d+)?", rf"{own}-v[\d.]+|\w+[-_]{own}"):
        found = [path for path, stem in stems.items() if re.fullmatch(pattern, stem)]
        if len(found) > 1 and "of" not in pattern:
            both = listed([path.name for path in found])
            raise UserError(
                f"{folder}: {both} could all be `{word}`; name one: task_splits: {{train: {found[0].name}}}"
            )
        if found:
            return found
    return []


def _hub_splits(spec: TaskSpec, given: dict[str, str]) -> dict[str, Split]:
    where = f"task_data=DIR with DIR/{spec.name}/train.jsonl and validation.jsonl (or .tsv, .csv, .parquet)"
    if not spec.hub:
        raise UserError(f"task_data: task {spec.name} names no data set of the hub; set {where}")
    if find_spec("datasets") is None:
        raise UserError(
            f"task_data: not set, so task {spec.name} would be read from the hub ({spec.hub['dataset']}), which needs "
            f"`datasets`: pip install datasets, or set {where}"
        )
    usual = {"train": "train", "test": "validation"} | {
        k: v for k, v in spec.hub.items() if k in ("train", "dev", "test")
    }
    found = {}
    for split, name in (usual | given).items():
        base, start, stop = _parts(name)
        parts = [spec.hub["dataset"], *([spec.hub["config"]] if "config" in spec.hub else []), base]
        found[split] = Split((":".join(parts),), start, stop)
    return found
