"""Names of models, tasks and methods in a comparison. They appear in tables, on a terminal and in file names.

A name must be printable and unique. A model without a name is called by the last part of its path, or by as many last
parts as are needed to distinguish it from the others.

Some settings of a run are what is compared, and have their own place in the file. Under a method or in `common` they
would be overwritten, or contradict the name of their row, so they are refused with a message that names the right
place.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from keyhole.config.faults import Finding
from keyhole.config.loader import COMMAND_LINE, LocatedNode
from keyhole.config.types import is_null, show

ZERO_SHOT = "zero-shot"  # the row of an untrained model
PLACES = {
    "model": "models are compared: write `models: [...]` at the top of the file, or model=DIR on the command line",
    "models": "models are compared: write `models: [...]` at the top of the file, or model=DIR on the command line",
    "seed": "seeds are compared: write `seeds: [...]` at the top of the file, or seeds=0,1 on the command line",
    "seeds": "seeds are compared: write `seeds: [...]` at the top of the file, or seeds=0,1 on the command line",
    "output_dir": "a comparison has one: write `output_dir: ...` at the top of the file, or output_dir=DIR on the "
    "command line",
    "task": "tasks are compared: write `tasks: [...]` at the top of the file, with `task: ...` under a name of a task, "
    "or tasks=NAME on the command line",
    "method": "methods are compared: write `methods: {...}` at the top of the file, with `method: ...` under a name of "
    "a method, or methods=NAME on the command line",
}


def word(node: yaml.Node) -> str | None:
    """The text of a scalar; None if it is something else, or null."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) and not is_null(node) else None


def line_of(node: yaml.Node) -> str:
    """`line 3`."""
    return f"line {node.start_mark.line + 1}"


def keys(node: yaml.MappingNode, what: str, faults: list[Finding]) -> list[tuple[str, yaml.Node, str]]:
    """(name, value, line) of each entry of a mapping whose key is a scalar."""
    found = []
    for key, value in node.value:
        name = word(key)
        if name is None:
            faults.append(Finding(what, f"a name must be a word, found {show(key)}", line_of(key)))
        else:
            found.append((name, value, line_of(key)))
    return found


def check_names(what: str, names: Sequence[str], where: str, faults: list[Finding]) -> None:
    """Refuses names with control characters, names given twice, and the name of the baseline for a method."""
    for name, count in Counter(names).items():
        if not name.strip() or not name.isprintable():
            message = f"the name {ascii(name)} is empty or has control characters; write it with plain characters"
            faults.append(Finding(what, message, where))
        elif count > 1:
            message = f"`{name}` is named twice; leave one out, or give one of them another name (name: ...)"
            faults.append(Finding(what, message, where))
        if what == "methods" and name == ZERO_SHOT:
            message = f"`{ZERO_SHOT}` is the row of the model as it is; give the method another name"
            faults.append(Finding(what, message, where))


def by_path(paths: Sequence[str], where: str, faults: list[Finding]) -> dict[str, str]:
    """Name -> path, by as many last parts as are needed to distinguish the paths; a repeated path is refused."""
    parts = [Path(path).parts or (path,) for path in paths]
    names = {}
    for i, own in enumerate(parts):
        others = [each for j, each in enumerate(parts) if j != i]
        same = [j for j, each in enumerate(parts) if each == own and j < i]
        if same:
            message = f"`{paths[same[0]]}` and `{paths[i]}` are one model, named twice; leave one out"
            faults.append(Finding("models", message, where))
        depth = next((n for n in range(1, len(own)) if all(own[-n:] != each[-n:] for each in others)), len(own))
        names[str(Path(*own[-depth:]))] = paths[i]
    return names


def refuse_misplaced(entries: dict[str, LocatedNode], place: str, own: Iterable[str], faults: list[Finding]) -> None:
    """Refuses settings that have their own place in the file. own: those that are allowed here."""
    for key in (key for key in entries if key in PLACES and key not in own):
        message = f"cannot stand {place}; {PLACES[key]}"
        faults.append(Finding(key, message, entries[key].where or COMMAND_LINE))
