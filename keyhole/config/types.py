"""From a YAML node to a typed value, and from a config to YAML. The field's type decides how the text is parsed, not
YAML's rules.

YAML 1.1 reads `2e-5` as text, `no` as False and `1:30` as 90. Here a float field reads the text `2e-5` as a
float and a text field keeps `no`, because both look at the characters in the file and at the declared type (limits.py).
Inside dict[str, object] there is no declared type, and YAML's rules apply.

A config is written with all values, including defaults, so that a run can be repeated from run/config.yaml: a later
version with other defaults must not change an old run.
"""

import dataclasses
import io
import math
import typing
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import yaml

from keyhole.config.fields import own_keys
from keyhole.config.schema import TrainConfig
from keyhole.errors import printable
from keyhole.limits import convert, describe
from keyhole.machine.sizes import Bytes

NULL_TAG = "tag:yaml.org,2002:null"
FASTEST: Any = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper  # of libyaml: four times as fast
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Mismatch(ValueError):
    """The node has no value of the type."""


class Twice(ValueError):
    """A name of a mapping is given twice; YAML's loaders would take the last in silence."""


def is_null(node: yaml.Node) -> bool:
    """Whether the node is YAML's null or an unquoted `None`."""
    if not isinstance(node, yaml.ScalarNode):
        return False
    return node.tag == NULL_TAG or (node.style is None and node.value in ("None", "none"))


def show(node: yaml.Node) -> str:
    """The value as written by the user, shortened to one line."""
    if isinstance(node, yaml.SequenceNode):
        return "a list" if node.value else "an empty list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if is_null(node):
        return "null"
    text = node.value if len(node.value) <= 60 else node.value[:57] + "..."
    return f"`{text}`" if text.isprintable() else ascii(text)


def tree(node: yaml.Node) -> object:
    """Lists and mappings of scalar nodes."""
    if isinstance(node, yaml.SequenceNode):
        return [tree(item) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return node
    found: dict[object, object] = {}
    for key, item in node.value:
        name = _scalar(tree(key), str)
        if name in found:
            raise Twice(name)
        found[name] = tree(item)
    return found


def _scalar(value: object, kind: object) -> object:
    """A scalar node as a value of this type, or ValueError; object: everything below it, by YAML's rules."""
    if kind is object and isinstance(value, list):
        return [_scalar(item, object) for item in value]
    if kind is object and isinstance(value, dict):
        return {name: _scalar(item, object) for name, item in value.items()}
    if not isinstance(value, yaml.ScalarNode):
        raise ValueError("a list or a mapping")
    if typing.get_origin(kind) is Literal and value.tag != NULL_TAG:
        words = typing.get_args(kind)
        return words[words.index(value.value)]  # `none` too, where it is one of the words
    if kind is not object and is_null(value) != (kind is NoneType):
        raise ValueError("null, or not")
    try:
        found = yaml.SafeLoader("").construct_object(value) if kind is object else _SCALARS[kind](value.value)
    except (KeyError, OverflowError, yaml.YAMLError) as error:
        raise ValueError(value.value) from error
    if not isinstance(found, str | int | float | bool | None):
        raise ValueError("not a value of JSON")
    return found


def parse(node: yaml.Node, kind: object) -> Any:
    """The node's value with this type; Mismatch says what was expected."""
    try:
        return convert(tree(node), kind, _scalar)
    except (ValueError, RecursionError) as error:
        again = f", each name once: `{printable(str(error), 80)}` is given twice" if isinstance(error, Twice) else ""
        raise Mismatch(describe(kind, full=True) + (again or _bad_item(node, kind))) from None


def _bad_item(node: yaml.Node, kind: object) -> str:
    """`; item 2 is -1`: the first item of a list or mapping that does not fit; "" if it does not fit as a whole."""
    arms = {typing.get_origin(arm): typing.get_args(arm) for arm in (kind, *typing.get_args(kind))}
    if list in arms and isinstance(node, yaml.SequenceNode):
        wrong = next((i for i, item in enumerate(node.value) if not _fits(item, arms[list][0])), None)
        return "" if wrong is None else f"; item {wrong + 1} is {show(node.value[wrong])}"
    if dict in arms and isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            if not (_fits(key, str) and _fits(item, arms[dict][1])):
                joined = isinstance(key, yaml.ScalarNode) and is_null(item) and ":" in key.value
                return f"; {show(key)} is {show(item)}" + "; write a space after the colon" * joined
    return ""


def _fits(node: yaml.Node, kind: object) -> bool:
    with suppress(Mismatch):
        parse(node, kind)
        return True
    return False


def _parse_int(text: str) -> int:
    """`10_000` and `1e4` are whole numbers too; `1.5` is not."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _parse_text(text: str) -> str:
    """Any text except an empty one, or one with a NUL, which paths cannot contain."""
    if not text.strip() or "\0" in text:
        raise ValueError("empty")
    return text


_SCALARS: dict[object, Callable[[str], object]] = {
    bool: lambda text: BOOLS[text.lower()],
    int: _parse_int,
    float: _parse_float,
    str: _parse_text,
    Bytes: Bytes.parse,
    NoneType: lambda text: None,
}


class _Dumper(FASTEST):
    """Safe YAML that quotes the word `None`, which the loader would read as null."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quoted = text in ("None", "none") or not text.isprintable()  # unquoted, PyYAML would fold unusual line breaks
    style = '"' if quoted else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(Bytes, lambda dumper, size: _represent_text(dumper, str(size)))
_Dumper.add_multi_representer(Path, lambda dumper, path: _represent_text(dumper, str(path)))


def dump(value: object) -> str:
    """Plain data as block YAML, keys in the order given, lines never folded."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30))


def to_node(value: object) -> yaml.MappingNode:
    """The YAML nodes of `dump(value)`, made without the text."""
    return _Dumper(io.StringIO(), sort_keys=False).represent_data(value)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """All values, sections nested; a plain int in gpu_memory gets its unit. What a caller of TrainConfig(..) has put
    into a section although it is a setting of the run stays there: the loader moves or refuses it."""
    values = dict(vars(config))
    for name, own in values.items():
        if dataclasses.is_dataclass(own):
            unusual = {e.name for e in dataclasses.fields(own) if vars(own)[e.name] != e.default}
            kept = own_keys(type(own)) | unusual
            values[name] = {key: value for key, value in vars(own).items() if key in kept}
    if isinstance(config.gpu_memory, int):
        values["gpu_memory"] = Bytes(config.gpu_memory)
    return values


def to_yaml(config: TrainConfig) -> str:
    """The config as YAML text."""
    return dump(to_dict(config))
