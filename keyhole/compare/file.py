"""A comparison file: what is compared, with which settings.

    # A title
    models: [dir-or-hub-id]                   or name: dir-or-hub-id
    tasks: [sst2, rte]                        or name: {settings of runs on this task}
    methods:
      adamw: {learning_rate: [1e-5, 3e-5]}    name: settings; a list is a grid
      lomo clipped: {method: lomo, max_grad_norm: 1.0, learning_rate: 3e-2}
    seeds: [0, 1, 2]
    choose_by: first-seed                     or all-seeds
    common: {batch_size: 16, num_train_epochs: 5, eval_steps: 50}
    output_dir: out

A method's name is the method itself, unless its settings have `method: ...`; the same holds for tasks (`task: ...`), so
that a file can compare variants of one method (names.py). A task file, dir/plants.yaml, is called plants, as
everywhere. Settings are those of `keyhole train` (docs/config.md), sections included. If a setting is given in several
places, the command line wins, then the method, the task, and `common`. For a setting that is itself a list
(lora.target_modules, freeze), a grid is a list of lists, or a list with null: [null, embeddings]. Seeds are listed, not
counted: `seeds: 3` is seed 3 alone, which a warning says.

On the command line, `model=`, `models=`, `tasks=`, `methods=` and `seeds=` replace or select what is compared, as names
separated by commas; any other setting applies to all runs.
"""

import re
import shlex
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from keyhole.compare.names import PLACES, by_path, check_names, keys, refuse_misplaced, word
from keyhole.config.faults import Finding, nearest, refuse
from keyhole.config.fields import settings
from keyhole.config.loader import COMMAND_LINE, LocatedNode, compose, open_sections, parse_override, read_text
from keyhole.config.rules import expanded
from keyhole.config.types import is_null, show
from keyhole.data.tasks.spec import task_name
from keyhole.errors import UserError
from keyhole.machine.text import printable

DIRECTORY = Path(__file__).parents[1] / "comparisons"
KEYS = ("models", "tasks", "methods", "seeds", "common", "output_dir", "choose_by")
WORDS = ("model", *KEYS[:4], *KEYS[5:])  # keys of the command line besides settings
CHOOSE_BY = ("first-seed", "all-seeds")
MOST_COUNTED = 20  # a single seed up to this may be meant as a number of seeds
Entries = dict[str, LocatedNode]


@dataclass
class Comparison:
    """A comparison. Entries are settings by dotted key, not yet converted to their types."""

    source: str
    title: str
    models: dict[str, str]
    tasks: dict[str, Entries]
    methods: dict[str, Entries]
    seeds: list[int]
    output_dir: str
    common: Entries = field(default_factory=dict)
    overrides: Entries = field(default_factory=dict)
    choose_by: str = CHOOSE_BY[0]
    words: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line of the comparison."""
        return shlex.join(["keyhole", "compare", self.source, *self.words])


def comparisons() -> dict[str, Path]:
    """The shipped comparisons: name -> file."""
    return {path.stem: path for path in sorted(DIRECTORY.glob("*.yaml"))}


def find_comparison(name: str) -> Path:
    """The file with this name, or the shipped comparison."""
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"{name} is a directory; a comparison is a YAML file")
    stem = name.removesuffix(".yaml")
    if stem in comparisons():
        return comparisons()[stem]
    shipped = ", ".join(comparisons())
    if near := nearest(stem, comparisons()):
        raise UserError(f"{name}: no such comparison file{near} Shipped are {shipped}")
    raise UserError(f"{name}: no such comparison file; shipped are {shipped}")


def read_comparison(path: Path, words: Iterable[str] = ()) -> Comparison:
    """The comparison of a file, with `key=value` arguments of the command line; reports all faults at once."""
    faults: list[Finding] = []
    text = read_text(path)
    root = compose(text, str(path), "start from a shipped comparison: `keyhole compare` lists them")
    nodes: dict[str, LocatedNode] = {}
    for key, node in root.value:
        where = f"line {key.start_mark.line + 1}"
        name = key.value if isinstance(key, yaml.ScalarNode) else show(key)
        if name in nodes:
            faults.append(Finding(name, f"given twice, also in {nodes[name].where}", where))
        elif name in KEYS:
            nodes[name] = LocatedNode(node, where)
        else:
            inside = "; a setting of all runs stands under `common`" if name in settings() else nearest(name, KEYS)
            inside = f"; {PLACES[name]}" if name in PLACES else inside
            faults.append(Finding(name, f"unknown key{inside}; a comparison has {', '.join(KEYS)}", where))
    words = tuple(words)
    overrides: Entries = {}
    picked: dict[str, str] = {}
    for typed in words:
        key, _, value = typed.partition("=")
        if key.strip() in WORDS:
            picked[key.strip()] = value.strip()
            if not value.strip("[] "):  # an unset variable of the shell, which would select everything
                faults.append(Finding(key.strip(), "nothing is named; name something, or leave it out", COMMAND_LINE))
        else:
            overrides |= parse_override(typed, faults)
    if {"model", "models"} <= picked.keys():
        faults.append(Finding("models", "given twice, as model= and as models=; leave one out", COMMAND_LINE))
    refuse_misplaced(overrides, "here", (), faults)
    made = Comparison(
        source=str(path),
        title=_title(text) or path.stem,
        models=_models(nodes, picked, faults),
        tasks=_named(nodes, "tasks", picked, faults, may_add=True),
        methods=_named(nodes, "methods", picked, faults, may_add=False),
        seeds=_seeds(nodes, picked, faults),
        output_dir=expanded(picked.get("output_dir") or _text(nodes, "output_dir", faults) or f"{path.stem}-out"),
        common=_settings(nodes.get("common"), faults),
        overrides=overrides,
        choose_by=picked.get("choose_by") or _text(nodes, "choose_by", faults) or CHOOSE_BY[0],
        words=words,
        warnings=_seed_warnings(nodes, picked),
    )
    if made.output_dir.startswith("~") or re.search(r"\$\{?\w", made.output_dir):
        faults.append(Finding("output_dir", f"found `{made.output_dir}`, which stands for no directory here"))
    if made.choose_by not in CHOOSE_BY:
        faults.append(Finding("choose_by", f"found `{made.choose_by}`, expected {' or '.join(CHOOSE_BY)}"))
    refuse_misplaced(made.common, "in `common`", (), faults)
    refuse(str(path), faults)
    return made


def _title(text: str) -> str:
    """The first line, if it is a comment."""
    first = text.removeprefix("\ufeff").partition("\n")[0].strip()
    return printable(first.lstrip("# ")) if first.startswith("#") else ""


def _settings(entry: LocatedNode | None, faults: list[Finding]) -> Entries:
    """The settings of a mapping; {} for null or nothing."""
    if entry is None or is_null(entry.node):
        return {}
    if isinstance(entry.node, yaml.MappingNode):
        return open_sections(entry.node, "", None, faults)
    faults.append(
        Finding("", f"found {show(entry.node)}, expected settings such as {{learning_rate: 1e-5}}", entry.where)
    )
    return {}


def _text(nodes: dict[str, LocatedNode], key: str, faults: list[Finding]) -> str | None:
    if key not in nodes:
        return None
    node = nodes[key].node
    if isinstance(node, yaml.ScalarNode) and not is_null(node):
        return str(node.value)
    faults.append(Finding(key, f"found {show(node)}, expected text", nodes[key].where))
    return None


def _words(node: yaml.Node) -> list[str] | None:
    """The texts of a scalar or a list of scalars; None if it is something else."""
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    found = [text for item in items if (text := word(item)) is not None]
    return found if found and len(found) == len(items) else None


def _odd_item(node: yaml.Node) -> str:
    """` whose item 2 is a mapping`: the first item of a list that is no text."""
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    return next((f" whose item {i} is {show(item)}" for i, item in enumerate(items, 1) if word(item) is None), "")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.strip("[] ").split(",") if part.strip()]


def _models(nodes: dict[str, LocatedNode], picked: dict[str, str], faults: list[Finding]) -> dict[str, str]:
    asked = _split(picked.get("model") or picked.get("models") or "")
    known: dict[str, str] = {}
    before = len(faults)
    if (entry := nodes.get("models")) is not None:
        if isinstance(entry.node, yaml.MappingNode):
            named = keys(entry.node, "models", faults)
            check_names("models", [name for name, _, _ in named], entry.where, faults)
            for name, node, where in named:
                if word(node) is None:
                    message = f"{show(node)} under `{printable(name)}`, expected a directory or hub id"
                    faults.append(Finding("models", message, where))
                known[name] = word(node) or ""
        elif (words := _words(entry.node)) is not None:
            known = by_path(words, entry.where, faults)
            check_names("models", list(known), entry.where, faults)
        else:
            faults.append(Finding("models", f"found {show(entry.node)}, expected directories or hub ids", entry.where))
    if asked:
        if set(asked) <= known.keys():
            check_names("models", asked, COMMAND_LINE, faults)
            return {name: known[name] for name in asked}
        known = by_path(asked, COMMAND_LINE, faults)
        check_names("models", list(known), COMMAND_LINE, faults)
    if not known and len(faults) == before:
        faults.append(Finding("models", "missing; name a directory or hub id, here or as model=DIR"))
    return known


def _named(
    nodes: dict[str, LocatedNode], key: str, picked: dict[str, str], faults: list[Finding], *, may_add: bool
) -> dict[str, Entries]:
    """Names with their settings; a list has only names. may_add: the command line may add others."""
    known: dict[str, Entries] = {}
    before = len(faults)
    if (entry := nodes.get(key)) is not None:
        if isinstance(entry.node, yaml.MappingNode):
            named = keys(entry.node, key, faults)
            check_names(key, [_called(key, name) for name, _, _ in named], entry.where, faults)
            for name, node, where in named:
                found = _settings(LocatedNode(node, where), faults)
                own = key.removesuffix("s")  # tasks may have `task`, methods `method`
                refuse_misplaced(found, f"under `{printable(name)}`", (own,), faults)
                known[_called(key, name)] = ({} if "train_data" in found else _file_entry(key, name)) | found
        elif (words := _words(entry.node)) is not None:
            check_names(key, [_called(key, name) for name in words], entry.where, faults)
            known = {_called(key, name): _file_entry(key, name) for name in words}
        else:
            shown = f"{show(entry.node)}{_odd_item(entry.node)}"
            wanted = "a list of names, or a mapping with a line `name: {settings}` for each"
            faults.append(Finding(key, f"found {shown}, expected {wanted}", entry.where))
    asked = _split(picked.get(key, ""))
    check_names(key, [_called(key, name) for name in asked], COMMAND_LINE, faults)
    for name in asked if not may_add else []:
        if name not in known:
            faults.append(Finding(key, f"`{name}` is not in the file, which has {', '.join(known)}", COMMAND_LINE))
    if not (asked or known) and len(faults) == before:
        faults.append(Finding(key, "missing; there is nothing to compare"))
    chosen = {_called(key, name): known.get(_called(key, name), {}) | _file_entry(key, name) for name in asked}
    return chosen if asked else known


def _called(key: str, name: str) -> str:
    """The name in tables: for a task file, its name without directory and suffix."""
    return task_name(name) if key == "tasks" else name


def _file_entry(key: str, name: str) -> Entries:
    """The setting `task`, if the name is that of a task file; {} otherwise."""
    if _called(key, name) == name:
        return {}
    return {"task": LocatedNode(yaml.ScalarNode("tag:yaml.org,2002:str", name), "")}


def _seeds(nodes: dict[str, LocatedNode], picked: dict[str, str], faults: list[Finding]) -> list[int]:
    if "seeds" not in nodes and "seeds" not in picked:
        return [0]
    words = _split(picked["seeds"]) if "seeds" in picked else _words(nodes["seeds"].node)
    try:
        seeds = [int(word) for word in words or []]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds):
        faults.append(Finding("seeds", "expected different whole numbers, such as [0, 1, 2]"))
    return seeds


def _seed_warnings(nodes: dict[str, LocatedNode], picked: dict[str, str]) -> tuple[str, ...]:
    """A warning about one seed without brackets that may be meant as the number of seeds."""
    text = picked.get("seeds") or (word(nodes["seeds"].node) if "seeds" in nodes else None) or ""
    count = int(text) if text.isdecimal() and len(text) <= 2 else 0
    if not 1 < count <= MOST_COUNTED:
        return ()
    several = ", ".join(map(str, range(count))) if count <= 3 else f"0, 1, ..., {count - 1}"
    return (f"seeds: {count} is seed {count} alone; [{several}] are {count} seeds",)


def takes_list(key: str) -> bool:
    """Whether the value of a setting may itself be a list."""
    kind: Any = settings()[key].type
    arms = typing.get_args(kind) if typing.get_origin(kind) is not list else (kind,)
    return any(typing.get_origin(arm) is list for arm in arms)
