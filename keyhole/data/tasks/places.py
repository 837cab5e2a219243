"""Where the rows of a task are: `<task>/` under the setting `task_data`, or a data set of the hub.

    task_data/sst2/train.tsv, task_data/SST-2/dev.tsv      the folder by the task's name; case, - and _ do not matter
    task_data/sst2/data/train-00000-of-00001.parquet       one folder deeper, if that is the only one with a split
    task_data/train.tsv                                    the folder itself, if it has no folder of that name

A split is a name with an optional slice: `train`, `validation`, `val[:2270]`, `val[-1000:]`, `train[:80%]`. A sum of
names is both files, and its slice applies to each (`plot+quote[:-1000]`). A name is matched, in this order, by

    the exact name         train.jsonl, a folder train/ (also as `save_to_disk` of `datasets` writes it), or with its
                           suffix: val.jsonl[:2270]
    its parts              train-00000-of-00002.parquet, of which all must be there
    a version or prefix    train-v1.1.json, drop_dataset_train.json

and validation is also called val, valid and dev. Without `task_data` the data come from the hub, through `datasets`.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from keyhole.assets import TRAIN
from keyhole.data.files import only_files, read_hub, saved_files
from keyhole.data.record import Record
from keyhole.data.tasks.columns import pick_all
from keyhole.data.tasks.spec import OWN_SPLITS, TaskSpec, plain
from keyhole.data.tasks.tables import read_rows, suffix_of
from keyhole.errors import UserError, listed

SAME = {"train": ("train", "training"), "validation": ("validation", "val", "valid", "dev")}
SLICE = re.compile(r"([^\[\]\0]{1,200})(?:\[(-?[0-9]{0,15}|-?[0-9]{1,3}%):(-?[0-9]{0,15}|-?[0-9]{1,3}%)\])?")

Bound = int | str | None


@dataclass(frozen=True)
class Split:
    """The files (or the hub id) of a split, and the slice of their rows."""

    names: tuple[str, ...]
    start: Bound = None  # "80%": a percentage of the rows
    stop: Bound = None
    each: bool = False  # the slice applies to each file, not to all rows together

    def rows(self, count: int) -> range:
        """The rows of the slice, out of `count` rows."""
        return range(*slice(_row(self.start, count), _row(self.stop, count)).indices(count))

    def divided(self, one: str = "train", other: str = "test") -> str:
        """A value of task_splits that divides the files between two splits, for any number of rows."""
        base = "+".join(Path(name).name if Path(name).is_file() else name.rpartition(":")[2] for name in self.names)
        return f'{{{one}: "{base}[:80%]", {other}: "{base}[80%:]"}}'

    def __str__(self) -> str:
        files = listed([Path(name).name for name in self.names], 3)
        low, high = ("" if n is None else n for n in (self.start, self.stop))
        return f"{files}[{low}:{high}]" if (self.start, self.stop) != (None, None) else files


def _row(bound: Bound, count: int) -> int | None:
    if not isinstance(bound, str):
        return bound
    part = count * abs(int(bound[:-1])) // 100
    return count - part if bound.startswith("-") else part


def find_splits(spec: TaskSpec, task_data: str | None, given: dict[str, str] | None = None) -> dict[str, Split]:
    """The splits train, test and optionally dev of a task. given: names instead of the task's own (task_splits)."""
    if task_data is None and spec.name == "demo":
        task_data = str(TRAIN.parent)
    if task_data is None:
        return _hub_splits(spec, given or {})
    folder = _folder(spec, Path(os.path.expanduser(task_data)))
    layouts = [{**layout, **{split: (name,) for split, name in (given or {}).items()}} for layout in spec.splits]
    if spec.splits is OWN_SPLITS:
        own = layouts.pop(0)
        three = {split: place for split, names in own.items() if (place := _find(folder, names, split))}
        if len(three) == len(own) and not {"dev", "test"} & (given or {}).keys():
            return three
    looked_for: dict[str, dict[str, None]] = {}
    there: dict[str, Split] = {}
    for layout in layouts:
        found = {split: place for split, names in layout.items() if (place := _find(folder, names, split))}
        if len(found) == len(layout):
            return found
        there |= found
        for split in (split for split in layout if split not in found):
            looked_for.setdefault(split, {}).update(dict.fromkeys(layout[split]))
    if "train" not in (given or {}):  # a test split alone is enough
        for layout in layouts:
            if test := _find(folder, layout["test"], "test"):
                return {"test": test}
    missing = " and none for ".join(f"{split} (looked for {listed(names)})" for split, names in looked_for.items())
    holds = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    raise UserError(
        f"task_data: {folder} has no file for {missing}; it holds {listed(holds)}{only_files(folder.iterdir())}. "
        f"Name the files by split (train.jsonl, validation.tsv, ...){_advice(folder, list(looked_for), there)}"
    )


def _advice(folder: Path, missing: list[str], there: dict[str, Split]) -> str:
    """A suggestion for task_splits, with the existing files."""
    taken = {name for place in there.values() for name in place.names}
    free = sorted(path for path in folder.iterdir() if suffix_of(path) and path.is_file() and str(path) not in taken)
    told = "; or say which is which: task_splits: "
    if len(free) >= len(missing):
        named = ", ".join(f"{split}: {path.name}" for split, path in _by_name(missing, free).items())
        return f"{told}{{{named}}}"
    whole = there.get("train") or (Split((str(free[0]),)) if free else None)
    return f"; or divide the one there is: task_splits: {whole.divided()}" if whole else ""


def _by_name(splits: list[str], files: list[Path]) -> dict[str, Path]:
    """A file for each split: the first with a name of the split in its own (my_dev_set.csv for test), else any."""
    words = {"train": ("train",), "dev": ("val", "dev"), "test": ("val", "dev", "test")}
    rest, found = list(files), {}
    for split in splits:
        fits = [path for word in words[split] for path in rest if word in path.name.lower()]
        if fits:
            found[split] = fits[0]
            rest.remove(fits[0])
    return {split: found.get(split) or rest.pop(0) for split in splits}


def read_split(spec: TaskSpec, split: Split, left_out: Counter[str]) -> list[Record]:
    """The labelled rows of a split, with the task's columns. left_out: counts the others."""
    found: list[Record] = []
    for names in [(name,) for name in split.names] if split.each else [split.names]:
        rows = list(pick_all(_rows(spec, names, left_out), spec, left_out))
        found += [rows[i] for i in split.rows(len(rows))]
    return found


def _rows(spec: TaskSpec, names: tuple[str, ...], left_out: Counter[str]) -> Iterator[Record]:
    for name in names:
        if os.path.exists(name) and not os.path.isfile(name):
            raise UserError(f"{name}: not a regular file but a pipe or a device; copy it into a file")
        yield from read_rows(Path(name), spec, left_out) if Path(name).is_file() else read_hub(name)


def _folder(spec: TaskSpec, root: Path) -> Path:
    if not os.path.isdir(root):
        raise UserError(f"task_data: {root}: no such directory (from {Path.cwd()})")
    wanted = dict.fromkeys(plain(name) for name in (spec.name, *spec.folders))
    inside = [path for path in sorted(root.iterdir()) if path.is_dir()]
    found = [path for name in wanted for path in inside if plain(path.name) == name]
    alike = [path.name for path in found if plain(path.name) == plain(found[0].name)]
    if len(alike) > 1:
        raise UserError(f"task_data: {root}: {listed(alike)} could all be the folder of task {spec.name}; rename one")
    if found:
        return _inner(spec, found[0])
    if any(suffix_of(path) for path in root.iterdir() if path.is_file()) or _has_split(spec, root):
        return root
    names = listed([path.name for path in inside]) or "no folder"
    raise UserError(
        f"task_data: {root} has no folder {spec.name}/ with the files of task {spec.name}; it holds {names}"
    )


def _inner(spec: TaskSpec, folder: Path) -> Path:
    """The task's folder, or the one inside that has its files: data/, or one named like the hub's config (main/)."""
    if _has_split(spec, folder):
        return folder
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and _has_split(spec, path)]
    named = [path for path in inside if path.name == spec.hub.get("config")]
    chosen = named or inside
    return chosen[0] if len(chosen) == 1 else folder


def _has_split(spec: TaskSpec, folder: Path) -> bool:
    try:
        return any(_find(folder, names, split) for layout in spec.splits for split, names in layout.items())
    except UserError:  # several files could be the split: reported when it is read
        return True


def _find(folder: Path, names: tuple[str, ...], split: str) -> Split | None:
    """The first of the names that exists. split: its purpose."""
    for name in names:
        words, start, stop = _parts(name, split)
        words = ["+".join(words)] if os.path.isfile(folder / "+".join(words)) else words
        found = [_called(folder, word, split) for word in words]
        if all(found):
            return Split(tuple(str(file) for files in found for file in files), start, stop, len(words) > 1)
    return None


def _called(folder: Path, name: str, split: str) -> list[Path]:
    return next((files for word in SAME.get(name.lower(), (name,)) if (files := _files(folder, word, split))), [])


def _parts(name: str, split: str) -> tuple[list[str], Bound, Bound]:
    match = SLICE.fullmatch(name)
    found = f"splits: found {name!r:.80} for {split} (of task_splits, or of the task's file)"
    if match is None:
        raise UserError(f"{found}, expected a name such as validation, or a part of it: val[:2270]")
    start, stop = _bound(match[2]), _bound(match[3])
    if any(isinstance(bound, str) and abs(int(bound[:-1])) > 100 for bound in (start, stop)):
        raise UserError(f"{found}, expected percentages of at most 100; all rows are {match[1]!r}")
    return match[1].split("+"), start, stop


def _bound(text: str | None) -> Bound:
    return None if text in (None, "", "-") else text if text.endswith("%") else int(text)


def _files(folder: Path, word: str, split: str) -> list[Path]:
    if os.path.isfile(folder / word):
        return [folder / word]
    if os.path.isdir(folder / word):
        if saved := saved_files(folder / word):
            return [Path(name) for name in saved]
        return sorted(path for path in (folder / word).iterdir() if suffix_of(path) and not path.is_dir())
    files = sorted(path for path in folder.iterdir() if suffix_of(path) and not path.is_dir())
    stems = {path: path.name.lower().removesuffix(".gz") for path in files}
    stems = {path: name.removesuffix(suffix_of(path)) for path, name in stems.items()}
    own = re.escape(word.lower())
    parts = rf"{own}[-_.](\d+)(?:-of-(\d+)(?:-[0-9a-f]{{16}})?)?"
    for pattern in (own, parts, rf"{own}-v[\d.]+|\w+[-_]{own}"):
        found = [path for path, stem in stems.items() if re.fullmatch(pattern, stem)]
        if len(found) > 1 and pattern != parts:
            both = listed([path.name for path in found])
            raise UserError(
                f"{folder}: {both} could all be `{word}`; name one: task_splits: {{{split}: {found[0].name}}}"
            )
        if found and pattern == parts:
            _check_parts(folder, split, {path: match for path in found if (match := re.fullmatch(parts, stems[path]))})
        if found:
            return found
    return []


def _check_parts(folder: Path, split: str, found: dict[Path, re.Match[str]]) -> None:
    """Refuses parts (00000-of-00002) that are not all there, or of which one is there twice."""
    totals = {match[2] for match in found.values()}
    if totals == {None}:
        return  # their names do not say how many there are
    numbers, count = sorted(int(match[1]) for match in found.values()), len(found)
    whole = [list(range(first, first + count)) for first in (0, 1)]
    if {None if each is None else int(each) for each in totals} != {count} or numbers not in whole:
        files = [path.name for path in found]
        raise UserError(
            f"{folder}: {listed(files)}: not one of each part; complete them, or name what is to be read: task_splits: "
            f"{{{split}: {files[0]}}}"
        )


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
        words, start, stop = _parts(name, split)
        place = [spec.hub["dataset"], *([spec.hub["config"]] if "config" in spec.hub else [])]
        found[split] = Split(tuple(":".join([*place, word]) for word in words), start, stop, len(words) > 1)
    return found
