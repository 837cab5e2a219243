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
that a file can compare variants of one method. A task file, dir/plants.yaml, is called plants, as
everywhere. Settings are those of `keyhole train` (docs/config.md), sections included. If a setting is given in several
places, the command line wins, then the method, the task, and `common`. For a setting that is itself a list
(lora.target_modules, freeze), a grid is a list of lists, or a list with null: [null, embeddings].

On the command line, `model=`, `models=`, `tasks=`, `methods=` and `seeds=` replace or select what is compared, as names
separated by commas; any other setting applies to all runs.

Names appear in tables, on a terminal and in file names, so they are printable and distinct. A model without a name is
called by the last part of its path, or by as many last parts as distinguish it from the others. What is compared has
its own place in the file: under a method or in `common` it would contradict the name of its row, and is refused.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from keyhole.config.faults import Finding, nearest, refuse
from keyhole.config.fields import settings
from keyhole.config.loader import COMMAND_LINE, LocatedNode, compose, open_sections, parse_override, read_text
from keyhole.config.rules import expanded
from keyhole.config.types import is_null, show
from keyhole.data.tasks.spec import task_name
from keyhole.errors import UserError
from keyhole.machine.text import last_parts, printable

ZERO_SHOT = "zero-shot"  # the row of an untrained model
DIRECTORY = Path(__file__).parents[1] / "comparisons"
KEYS = ("models", "tasks", "methods", "seeds", "common", "output_dir", "choose_by")
WORDS = ("model", *KEYS[:4], *KEYS[5:])  # keys of the command line besides settings
CHOOSE_BY = ("first-seed", "all-seeds")
TOP = "at the top of the file"
MODELS = f"models are compared: write `models: [...]` {TOP}, or model=DIR on the command line"
SEEDS = f"seeds are compared: write `seeds: [...]` {TOP}, or seeds=0,1 on the command line"
PLACES = {
    "model": MODELS,
    "models": MODELS,
    "seed": SEEDS,
    "seeds": SEEDS,
    "output_dir": f"a comparison has one: write `output_dir: ...` {TOP}, or output_dir=DIR on the command line",
    "task": f"tasks are compared: write `tasks: [...]` {TOP}, with `task: ...` under a name of a task, or tasks=NAME "
    "on the command line",
    "method": f"methods are compared: write `methods: {{...}}` {TOP}, with `method: ...` under a name of a method, or "
    "methods=NAME on the command line",
}
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
    text: str = ""  # of the file

    @property
    def command(self) -> str:
        return shlex.join(["keyhole", "compare", self.source, *self.words])


def comparisons() -> dict[str, Path]:
    return {path.stem: path for path in sorted(DIRECTORY.glob("*.yaml"))}


def find_comparison(name: str) -> Path:
    path, shipped = Path(name), comparisons()
    if path.is_file():
        return path
    stem = name.removesuffix(".yaml")
    if stem in shipped:
        return shipped[stem]
    near = nearest(stem, shipped) or "."
    raise UserError(f"{name}: no such comparison file{near} Shipped are {', '.join(shipped)}")


def read_comparison(path: Path, words: Iterable[str] = ()) -> Comparison:
    """The comparison of a file, with `key=value` arguments of the command line; reports all faults at once."""
    text, words = read_text(path), tuple(words)
    root = compose(text, str(path), "start from a shipped comparison: `keyhole compare` lists them")
    first = text.removeprefix("\ufeff").partition("\n")[0].strip()
    reader = _Reader(root, words)
    made = Comparison(
        source=str(path),
        title=printable(first.lstrip("# ")) if first.strip("# ") and first.startswith("#") else path.stem,
        models=reader.models(),
        tasks=reader.named("tasks"),
        methods=reader.named("methods"),
        seeds=reader.seeds(),
        output_dir=expanded(reader.text("output_dir") or f"{path.stem}-out"),
        common=reader.settings(reader.nodes.get("common"), "in `common`"),
        overrides=reader.overrides,
        choose_by=reader.text("choose_by") or CHOOSE_BY[0],
        words=words,
        text=text,
    )
    if made.choose_by not in CHOOSE_BY:
        reader.fault("choose_by", f"found `{made.choose_by}`, expected {' or '.join(CHOOSE_BY)}")
    refuse(str(path), reader.faults)
    return made


class _Reader:
    """The nodes of a file by their keys, and what the command line puts in their place: names that it picks, and
    settings of all runs."""

    def __init__(self, root: yaml.MappingNode, words: Iterable[str]) -> None:
        self.nodes: Entries = {}
        self.picked: dict[str, str] = {}
        self.overrides: Entries = {}
        self.faults: list[Finding] = []
        for key, node in root.value:
            where, name = _line_of(key), _word(key) or show(key)
            if name in self.nodes:
                self.fault(name, f"given twice, also in {self.nodes[name].where}", where)
            elif name in KEYS:
                self.nodes[name] = LocatedNode(node, where)
            else:
                inside = "; a setting of all runs stands under `common`" if name in settings() else nearest(name, KEYS)
                inside = f"; {PLACES[name]}" if name in PLACES else inside
                self.fault(name, f"unknown key{inside}; a comparison has {', '.join(KEYS)}", where)
        for typed in words:
            key, _, value = (part.strip() for part in typed.partition("="))
            if key not in WORDS:
                self.overrides |= parse_override(typed, self.faults)
                continue
            self.picked[key] = value
            if not value.strip("[] "):  # an unset variable of the shell, which would select everything
                self.fault(key, "nothing is named; name something, or leave it out", COMMAND_LINE)
        if {"model", "models"} <= self.picked.keys():
            self.fault("models", "given twice, as model= and as models=; leave one out", COMMAND_LINE)
        self.refuse_misplaced(self.overrides, "here")

    def fault(self, key: str, message: str, where: str = "") -> None:
        self.faults.append(Finding(key, message, where))

    def text(self, key: str) -> str | None:
        entry = self.nodes.get(key)
        if entry is not None and _word(entry.node) is None:
            self.fault(key, f"found {show(entry.node)}, expected text", entry.where)
        return self.picked.get(key) or (_word(entry.node) if entry is not None else None)

    def settings(self, entry: LocatedNode | None, place: str, own: str = "") -> Entries:
        """The settings of a mapping; {} for null or nothing. own: one that this place alone may have."""
        if entry is None or is_null(entry.node):
            return {}
        if not isinstance(entry.node, yaml.MappingNode):
            self.fault("", f"found {show(entry.node)}, expected settings such as {{learning_rate: 1e-5}}", entry.where)
            return {}
        found = open_sections(entry.node, "", None, self.faults)
        self.refuse_misplaced({key: each for key, each in found.items() if key != own}, place)
        return found

    def refuse_misplaced(self, entries: Entries, place: str) -> None:
        """Refuses settings that have their own place in the file."""
        for key in entries.keys() & PLACES.keys():
            self.fault(key, f"cannot stand {place}; {PLACES[key]}", entries[key].where or COMMAND_LINE)

    def names(self, key: str, wanted: str) -> list[tuple[str, LocatedNode | None]]:
        """The names under a key, with their values in a mapping, without in a list."""
        if key not in self.nodes:
            return []
        node, where = self.nodes[key].node, self.nodes[key].where
        if isinstance(node, yaml.MappingNode):
            pairs = [(name, LocatedNode(value, _line_of(name))) for name, value in node.value]
            for name in (name for name, _ in pairs if _word(name) is None):
                self.fault(key, f"a name must be a word, found {show(name)}", _line_of(name))
            return [(text, entry) for name, entry in pairs if (text := _word(name)) is not None]
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found: list[tuple[str, LocatedNode | None]] = [(text, None) for item in items if (text := _word(item))]
        if not found or len(found) < len(items):
            self.fault(key, f"found {show(node)}, expected {wanted}", where)
            return []
        return found

    def models(self) -> dict[str, str]:
        """Name -> directory or hub id. A model without a name is called by the last parts of its path."""
        found = self.names("models", "directories or hub ids")
        where = self.nodes["models"].where if "models" in self.nodes else ""
        known = self.by_path([name for name, entry in found if entry is None], where)
        named = [(name, entry) for name, entry in found if entry is not None]
        self.check_names("models", [name for name, _ in named], where)
        for name, entry in named:
            known[name] = _word(entry.node) or ""
            if not known[name]:
                message = f"{show(entry.node)} under `{printable(name)}`, expected a directory or hub id"
                self.fault("models", message, entry.where)
        asked = _split(self.picked.get("model") or self.picked.get("models") or "")
        if asked and {*asked} <= known.keys():
            known = {name: known[name] for name in asked}
            self.check_names("models", asked, COMMAND_LINE)
        elif asked:
            known = self.by_path(asked, COMMAND_LINE)
        if not known and not any(fault.key == "models" for fault in self.faults):
            self.fault("models", "missing; name a directory or hub id, here or as model=DIR")
        return known

    def by_path(self, paths: Sequence[str], where: str) -> dict[str, str]:
        names = last_parts(paths)
        self.check_names("models", names, where)
        return dict(zip(names, paths, strict=True))

    def named(self, key: str) -> dict[str, Entries]:
        """Tasks or methods with their settings. The command line may add tasks, and select methods."""
        found, known = self.names(key, "a list of names, or a mapping with a line `name: {settings}` for each"), {}
        asked = _split(self.picked.get(key, ""))
        where = self.nodes[key].where if key in self.nodes else ""
        self.check_names(key, [_called(key, name) for name, _ in found], where)
        self.check_names(key, [_called(key, name) for name in asked], COMMAND_LINE)
        for name, entry in found:
            own = self.settings(entry, f"under `{printable(name)}`", key.removesuffix("s"))
            known[_called(key, name)] = ({} if "train_data" in own else _file_entry(key, name)) | own
        for name in (name for name in asked if key == "methods" and name not in known):
            self.fault(key, f"`{name}` is not in the file, which has {', '.join(known)}", COMMAND_LINE)
        if not (asked or known) and not any(fault.key == key for fault in self.faults):
            self.fault(key, "missing; there is nothing to compare")
        chosen = {_called(key, name): known.get(_called(key, name), {}) | _file_entry(key, name) for name in asked}
        return chosen if asked else known

    def check_names(self, key: str, names: Sequence[str], where: str) -> None:
        """Refuses names with control characters, names given twice, and the name of the baseline for a method."""
        for name, count in Counter(names).items():
            if not name.strip() or not name.isprintable():
                message = f"the name {ascii(name)} is empty or has control characters; write it with plain characters"
                self.fault(key, message, where)
            elif count > 1:
                message = f"`{name}` is named twice; leave one out, or give one of them another name (name: ...)"
                self.fault(key, message, where)
            if key == "methods" and name == ZERO_SHOT:
                self.fault(key, f"`{ZERO_SHOT}` is the row of the model as it is; choose another name", where)

    def seeds(self) -> list[int]:
        """Different whole numbers: a list in the file, so that nobody takes `seeds: 3` for three of them."""
        words = ["0"]
        if "seeds" in self.nodes:
            node = self.nodes["seeds"].node
            words = [_word(item) or "" for item in node.value] if isinstance(node, yaml.SequenceNode) else []
        if "seeds" in self.picked:
            words = _split(self.picked["seeds"])
        with suppress(ValueError):
            seeds = [int(text) for text in words]
            if seeds and len(set(seeds)) == len(seeds):
                return seeds
        self.fault("seeds", "expected a list of different whole numbers, such as [0, 1, 2]")
        return []


def _word(node: yaml.Node) -> str | None:
    """The text of a scalar; None if it is something else, or null."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) and not is_null(node) else None


def _line_of(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.strip("[] ").split(",") if part.strip()]


def _called(key: str, name: str) -> str:
    """The name in tables: for a task file, its name without directory and suffix."""
    return task_name(name) if key == "tasks" else name


def _file_entry(key: str, name: str) -> Entries:
    """The setting `task`, if the name is that of a task file; {} otherwise."""
    return {} if _called(key, name) == name else text_entries({"task": name})


def text_entries(values: dict[str, str]) -> Entries:
    """Settings as texts, of no place in a file."""
    return {key: LocatedNode(yaml.ScalarNode("tag:yaml.org,2002:str", value), "") for key, value in values.items()}
