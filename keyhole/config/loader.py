"""Reads a YAML file and `key=value` overrides into a typed config; reports all faults at once.

    text --compose--> nodes with line numbers --open sections--> {"zo.eps": node} --+
    key=value       -------------------------------------------> {"zo.eps": node} --+--> typed --> TrainConfig

An override replaces the file's entry before anything is checked, so it can also correct a fault. Only known keys are
parsed, so aliases and deep nesting cost nothing; nothing is evaluated, imported or interpolated.
"""

import stat
from collections.abc import Collection, Iterable
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from keyhole.config import rules
from keyhole.config.faults import MOST_SHOWN, Finding, refuse, suggest_key, suggest_value
from keyhole.config.fields import REMOVED, REMOVED_VALUES, RENAMED, sections, settings
from keyhole.config.schema import TrainConfig
from keyhole.config.types import NULL_TAG, Mismatch, is_null, parse, show, to_dict, to_node
from keyhole.errors import UserError
from keyhole.limits import choices
from keyhole.methods import METHODS

STR_TAG = "tag:yaml.org,2002:str"
COMMAND_LINE = "command line"
LIMIT_BYTES = 2**18  # a hundred long configs; PyYAML reads 100 KB per second


@dataclass(frozen=True)
class LocatedNode:
    """A YAML node and the place it came from: "line 3", "command line", or "" for a config made in Python."""

    node: yaml.Node
    where: str


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> tuple[TrainConfig, list[str]]:
    """Reads a config file and overrides; returns the resolved config and warnings, or raises UserError."""
    return parse_config(read_text(path), overrides, source=str(path))


def read_text(path: str | Path) -> str:
    """The text of a YAML file of at most LIMIT_BYTES; UserError if it cannot be read. A named pipe is refused, because
    reading could block; a pipe that the shell has opened for the command, as in `keyhole train <(...)`, is read."""
    try:
        if stat.S_ISFIFO(Path(path).stat().st_mode) and Path(path).parent != Path("/dev/fd"):
            raise ValueError("it is a pipe")
        with open(path, "rb") as file:
            content = file.read(LIMIT_BYTES + 1)
        if len(content) > LIMIT_BYTES:
            raise ValueError(f"it has more than {LIMIT_BYTES:,} bytes")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); is it a YAML file?") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot read the file: {why}") from None


def resolve(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Applies the same checks and defaults to a config made in Python; applying it twice changes nothing."""
    faults: list[Finding] = []
    return build_config(open_sections(to_node(to_dict(config)), "", "", faults), "TrainConfig", faults)


def parse_settings(words: Iterable[str], allowed: Collection[str]) -> dict[str, Any]:
    """The typed values of key=value arguments, for a command with a few settings and no config."""
    faults: list[Finding] = []
    entries: dict[str, LocatedNode] = {}
    for word in words:
        entries |= parse_override(word, faults)
    for key in entries.keys() & settings().keys() - set(allowed):
        faults.append(Finding(key, f"not used here; this command takes {', '.join(allowed)}", COMMAND_LINE))
    values = _typed(entries, faults)
    refuse("settings", faults)
    return values


def parse_config(
    text: str, overrides: Iterable[str] = (), *, source: str = "config", where: str | None = None
) -> tuple[TrainConfig, list[str]]:
    """Parses config text, for load_config. `where` replaces line numbers."""
    faults: list[Finding] = []
    warnings: list[str] = []
    entries = open_sections(compose(text, source), "", where, faults)
    typed: dict[str, LocatedNode] = {}
    for word in overrides:
        new = parse_override(word, faults)
        for key in typed.keys() & new.keys():
            if (before := show(typed[key].node)) != (after := show(new[key].node)):
                warnings.append(str(Finding(key, f"given twice; {after} counts, not {before}", COMMAND_LINE)))
        typed |= new
    config, more = build_config(entries | typed, source, faults)
    return config, [*warnings, *more]


def build_config(
    entries: dict[str, LocatedNode], source: str, faults: list[Finding] | None = None
) -> tuple[TrainConfig, list[str]]:
    """The config from these entries, and warnings. faults: those found so far."""
    faults, renamed = faults or [], list[str]()
    entries = _renamed(entries, faults, renamed)
    values = _typed(entries, faults)
    for key, setting in settings().items():
        if setting.default is MISSING and key not in entries:
            words = ", ".join(choices(setting.type))
            one_of = f" One of {words}." if words else ""
            faults.append(Finding(key, f"missing, and there is no default. {setting.doc}{one_of}"))
    refuse(source, faults)
    made = {key: value for key, value in values.items() if "." not in key}
    made |= {
        name: cls(**{key.partition(".")[2]: values[key] for key in values if key.startswith(f"{name}.")})
        for name, cls in sections().items()
    }
    config, faults, warnings = rules.apply(TrainConfig(**made))
    refuse(source, [_placed(fault, entries) for fault in faults])
    return config, renamed + [str(_placed(warning, entries)) for warning in warnings]


def _renamed(entries: dict[str, LocatedNode], faults: list[Finding], warnings: list[str]) -> dict[str, LocatedNode]:
    """The entries by their names of today; the command line goes before the file under either name. One of the section
    of another method is dropped, as that section is."""
    method = entries["method"].node.value if "method" in entries else None
    own = METHODS[method].section if isinstance(method, str) and method in METHODS else None
    found = {key: entry for key, entry in entries.items() if key not in RENAMED}
    for key in [key for key in entries if key in RENAMED]:
        entry, new, beside = entries[key], RENAMED[key], entries.get(RENAMED[key])
        typed = entry.where == COMMAND_LINE
        if own is not None and not key.startswith((f"{own}.", "offload.")):
            warnings.append(str(Finding(key, f"has no effect: the method is {method}", entry.where)))
        elif beside is not None and (beside.where == COMMAND_LINE) == typed:
            faults.append(Finding(key, f"is `{new}` now, which is given too; leave this one out", entry.where))
        elif beside is None or typed:
            warnings.append(str(Finding(key, f"is `{new}` now; the old name is still read", entry.where)))
            found[new] = entry
    return found


def compose(text: str, source: str, empty: str = "start from a recipe: keyhole config ls") -> yaml.MappingNode:
    """The mapping of a YAML text. empty: what to do where there is none."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark else ""
        raise UserError(f"{source}:{line} not valid YAML: {error.problem or error.context}{_star(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: not valid YAML: {str(error) or type(error).__name__}") from None
    if root is None or is_null(root):
        raise UserError(f"{source}: the file is empty; {empty}")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{source}: expected `key: value` lines, found {show(root)}")
    return root


def _star(error: Exception) -> str:
    """What to do where YAML takes a name with a star, such as *.mlp.*, for a reference to another value."""
    told = str(error)  # of the scanner, or of the composer
    is_one = "while scanning an alias" in told or "undefined alias" in told
    return '; a text that begins with * needs quotes, such as "*.mlp.*"' if is_one else ""


def open_sections(
    root: yaml.Node | None, prefix: str, where: str | None, faults: list[Finding]
) -> dict[str, LocatedNode]:
    """Dotted key -> entry, of a file or a section; only sections are flattened. where: replaces line numbers."""
    entries: dict[str, LocatedNode] = {}
    if not isinstance(root, yaml.MappingNode):
        if root is not None and not is_null(root):
            key, place = prefix.rstrip("."), f"line {root.start_mark.line + 1}" if where is None else where
            faults.append(Finding(key, f"found {show(root)}, expected a section such as {key}: {{...}}", place))
        return entries
    for key_node, node in root.value:
        place = f"line {key_node.start_mark.line + 1}" if where is None else where
        if not isinstance(key_node, yaml.ScalarNode):
            faults.append(Finding("", f"a key must be a word, found {show(key_node)}", place))
            continue
        key = prefix + key_node.value
        inside = key in sections()
        new = open_sections(node, f"{key}.", where, faults) if inside else {key: LocatedNode(node, place)}
        for name in entries.keys() & new.keys():
            faults.append(Finding(name, f"given twice, also in {entries[name].where}", new[name].where))
        entries |= new
    return entries


def parse_override(word: str, faults: list[Finding]) -> dict[str, LocatedNode]:
    """One `key=value` word; brackets, braces and quotes are YAML, everything else is plain text. A text
    setting is plain text even if it begins with a bracket or a brace (prompt={sentence} It was), and keeps its spaces:
    the shell has removed the quotes of completion=" {label}", and the answer begins with a space."""
    key, _, typed = word.partition("=")
    key, text = key.strip(), typed.strip()
    if not key or not text:  # a variable of the shell that is not set must not mean a default
        said = f"`{word}`: write key=value, such as learning_rate=1e-5; null stands for no value"
        faults.append(Finding("", said, COMMAND_LINE))
        return {}
    node: yaml.Node | None = yaml.ScalarNode(NULL_TAG if text in ("~", "null") else STR_TAG, text)
    is_text = key in settings() and settings()[key].type in (str, str | None)
    if is_text and not is_null(node):
        node = yaml.ScalarNode(STR_TAG, typed)
    if text[:1] in (tuple("\"'") if is_text else tuple("[{\"'")):
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            inside = f"text with brackets needs quotes inside: '{key}={{name: \"...\"}}'"
            quotes = inside if text.startswith("{") else f"plain text needs quotes: '{key}=\"...\"'"
            faults.append(Finding(key, f"cannot read `{text}`{_star(error) or f'; {quotes}'}", COMMAND_LINE))
            return {}
    if key in sections():
        return open_sections(node, f"{key}.", COMMAND_LINE, faults)
    return {key: LocatedNode(node, COMMAND_LINE)}


def _typed(entries: dict[str, LocatedNode], faults: list[Finding]) -> dict[str, Any]:
    table, values = settings(), {}
    for key, entry in entries.items():
        if key in REMOVED:
            faults.append(Finding(key, f"is no key any more; {REMOVED[key]}", entry.where))
            continue
        if key not in table:
            near = suggest_key(key) if len(faults) < MOST_SHOWN else ""  # further ones are only counted
            faults.append(Finding(key, f"unknown key{near}", entry.where))
            continue
        try:
            values[key] = parse(entry.node, table[key].type)
        except Mismatch as error:
            inside = entry.node.value  # of a list: deeper levels are ignored (aliases can be recursive)
            if isinstance(entry.node, yaml.SequenceNode):
                inside = [item.value for item in inside if isinstance(item, yaml.ScalarNode)]
            near = suggest_value(inside, choices(table[key].type)) or REMOVED_VALUES.get(f"{key}={inside}", "")
            faults.append(Finding(key, f"found {show(entry.node)}, expected {error}{near}", entry.where))
    return values


def _placed(finding: Finding, entries: dict[str, LocatedNode]) -> Finding:
    """The finding with the place where its key was set."""
    return replace(finding, where=entries[finding.key].where) if finding.key in entries else finding
