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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from keyhole.assets import TRAIN
from keyhole.data.opened import Record
from keyhole.data.sources import is_saved, names_in
from keyhole.data.tasks.spec import OWN_SPLITS, SPLITS, TaskSpec, own_splits, plain
from keyhole.data.tasks.tables import pick_all, read_rows, suffix_of
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
    """The splits train, test and optionally dev of a task. given: the setting task_splits."""
    given = own_splits(given, spec.name)
    if task_data is None and spec.name == "demo":
        task_data = str(TRAIN.parent)
    if task_data is None:
        return _hub_splits(spec, given)
    folder = _folder(spec, Path(os.path.expanduser(task_data)))
    layouts = [{**layout, **{split: (name,) for split, name in given.items()}} for layout in spec.splits]
    three = spec.splits is OWN_SPLITS  # the first layout is three files of a user's own
    if three and {"dev", "test"} & given.keys():
        layouts, three = layouts[1:], False
    found = [{s: place for s, names in layout.items() if (place := _find(folder, names, s))} for layout in layouts]
    whole = [there for layout, there in zip(layouts, found, strict=True) if len(there) == len(layout)]
    alone = [{"test": there["test"]} for there in found[three:] if "test" in there and "train" not in given]
    if whole or alone:  # a test split alone is enough
        return (whole or alone)[0]
    missing: dict[str, dict[str, None]] = {}
    for layout, there in list(zip(layouts, found, strict=True))[three:]:
        for split in (split for split in SPLITS if split in layout and split not in there):
            missing.setdefault(split, {}).update(dict.fromkeys(layout[split]))
    told = " and none for ".join(f"{split} (looked for {listed(names)})" for split, names in missing.items())
    train = next((there["train"] for there in found if "train" in there), None)
    taken = {name for there in found for place in there.values() for name in place.names}
    free = [path for path in sorted(folder.iterdir()) if suffix_of(path) and path.is_file() and str(path) not in taken]
    advice = ""
    if len(free) >= len(missing):
        advice = f"; or say which is which: task_splits: {{{', '.join(f'{split}: FILE' for split in missing)}}}"
    elif train or free:
        advice = f"; or divide the one there is: task_splits: {(train or Split((str(free[0]),))).divided()}"
    raise UserError(
        f"task_data: {folder} has no file for {told}; it holds {listed(sorted(names_in(list(folder.iterdir()))))}. "
        f"Name the files by split (train.jsonl, validation.tsv, ...){advice}"
    )


def read_split(spec: TaskSpec, split: Split, left_out: Counter[str]) -> list[Record]:
    """The labelled rows of a split, with the task's columns. left_out: counts the others."""
    found: list[Record] = []
    for names in [(name,) for name in split.names] if split.each else [split.names]:
        records = (record for name in names for record in read_rows(name, spec, left_out))
        rows = list(pick_all(records, spec, left_out))
        found += [rows[i] for i in split.rows(len(rows))]
    return found


def _folder(spec: TaskSpec, root: Path) -> Path:
    """The task's folder, the one inside that has its files (data/, or one named like the hub's config), or the root."""
    if not os.path.isdir(root):
        raise UserError(f"task_data: {root}: no such directory (from {Path.cwd()})")
    inside = [path for path in sorted(root.iterdir()) if path.is_dir()]
    for wanted in dict.fromkeys(plain(name) for name in (spec.name, *spec.folders)):
        found = [path for path in inside if plain(path.name) == wanted]
        if len(found) > 1:
            told = f"{listed([path.name for path in found])} could all be the folder of task {spec.name}; rename one"
            raise UserError(f"task_data: {root}: {told}")
        if found:
            deeper = [path for path in sorted(found[0].iterdir()) if path.is_dir() and _has_split(spec, path)]
            deeper = [path for path in deeper if path.name == spec.hub.get("config")] or deeper
            return deeper[0] if len(deeper) == 1 and not _has_split(spec, found[0]) else found[0]
    if any(suffix_of(path) for path in root.iterdir() if path.is_file()) or _has_split(spec, root):
        return root
    names = listed([path.name for path in inside]) or "no folder"
    raise UserError(
        f"task_data: {root} has no folder {spec.name}/ with the files of task {spec.name}; it holds {names}"
    )


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
        found = []
        for word in words:
            same = SAME.get(word.lower(), (word,))
            found.append(next((files for each in same if (files := _files(folder, each, split))), []))
        if all(found):
            return Split(tuple(str(file) for files in found for file in files), start, stop, len(words) > 1)
    return None


def _parts(name: str, split: str) -> tuple[list[str], Bound, Bound]:
    match = SLICE.fullmatch(name)
    found = f"splits: found {name!r:.80} for {split} (of task_splits, or of the task's file)"
    if match is None:
        raise UserError(f"{found}, expected a name such as validation, or a part of it: val[:2270]")
    bounds = [
        None if text in (None, "", "-") else text if text.endswith("%") else int(text) for text in match.group(2, 3)
    ]
    if any(isinstance(bound, str) and abs(int(bound[:-1])) > 100 for bound in bounds):
        raise UserError(f"{found}, expected percentages of at most 100; all rows are {match[1]!r}")
    return match[1].split("+"), bounds[0], bounds[1]


def _files(folder: Path, word: str, split: str) -> list[Path]:
    if os.path.isfile(folder / word) or is_saved(folder / word):
        return [folder / word]
    inside = folder / word if os.path.isdir(folder / word) else folder
    files = sorted(path for path in inside.iterdir() if suffix_of(path) and not path.is_dir())
    if inside != folder:
        return files
    stems = {path: path.name.lower().removesuffix(".gz").removesuffix(suffix_of(path)) for path in files}
    own = re.escape(word.lower())
    parts = rf"{own}[-_.](\d+)(?:-of-(\d+)(?:-[0-9a-f]{{16}})?)?"
    for pattern in (own, parts, rf"{own}-v[\d.]+|\w+[-_]{own}"):
        found = {path: match for path, stem in stems.items() if (match := re.fullmatch(pattern, stem))}
        numbered = [(match[1], match[2]) for match in found.values()] if pattern == parts else []
        if len(found) > 1 and not numbered:
            fault = f" could all be `{word}`; name one"
        elif any(total for _, total in numbered) and not _is_whole(numbered):  # their names say how many there are
            fault = ": not one of each part; complete them, or name what is to be read"
        elif found:
            return list(found)
        else:
            continue
        names = [path.name for path in found]
        raise UserError(f"{folder}: {listed(names)}{fault}: task_splits: {{{split}: {names[0]}}}")
    return []


def _is_whole(numbered: list[tuple[str, str | None]]) -> bool:
    """Whether there is one of each part, of (number, total)."""
    numbers, count = sorted(int(number) for number, _ in numbered), len(numbered)
    counted = all(total is not None and int(total) == count for _, total in numbered)
    return counted and numbers in (list(range(count)), list(range(1, count + 1)))


def _hub_splits(spec: TaskSpec, given: dict[str, str]) -> dict[str, Split]:
    where = f"task_data=DIR with DIR/{spec.name}/train.jsonl and validation.jsonl (or .tsv, .csv, .parquet)"
    if not spec.hub:
        raise UserError(f"task_data: task {spec.name} names no data set of the hub; set {where}")
    if find_spec("datasets") is None:
        raise UserError(
            f"task_data: not set, so task {spec.name} would be read from the hub ({spec.hub['dataset']}), which needs "
            f"`datasets`: pip install datasets, or set {where}"
        )
    own = {split: name for split, name in spec.hub.items() if split in SPLITS}
    place = [spec.hub["dataset"], *([spec.hub["config"]] if "config" in spec.hub else [])]
    found = {}
    for split, name in ({"train": "train", "test": "validation"} | own | given).items():
        words, start, stop = _parts(name, split)
        found[split] = Split(tuple(":".join([*place, word]) for word in words), start, stop, len(words) > 1)
    return found
