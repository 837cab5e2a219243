"""From a YAML node to a typed value: the field's type decides how the text is parsed, not YAML's rules.

YAML 1.1 reads `2e-5` as text, `no` as False and `1:30` as 90. Here a float field reads the text `2e-5` as a
float and a text field keeps `no`, because both look at the characters in the file and at the declared type.
Handled types: bool, int, float, str, Bytes, Literal, list[T], dict[str, T], T | None, T | U, Annotated[T, Limit].
Inside dict[str, Any] there is no declared type, and YAML's rules apply.
"""

import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import yaml

from keyhole.errors import printable
from keyhole.limits import Limit
from keyhole.machine.sizes import EXPECTED as A_SIZE
from keyhole.machine.sizes import Bytes

NULL_TAG = "tag:yaml.org,2002:null"
MOST_NODES = 1000
UNFIT = (ValueError, OverflowError, KeyError, RecursionError, yaml.YAMLError)  # raised for a node that does not fit
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Mismatch(ValueError):
    """The node has no value of the type."""


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


def describe(kind: Any, full: bool = False) -> str:
    """The type in words, for the help and the docs page; full: with every bound, for error messages."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return f"{describe(args[0])} {args[1].describe(full)}"
    if origin is Literal:
        return " | ".join(args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arm, full) for arm in args)
    if origin is list:
        return f"list of {describe(args[0])}"
    if origin is dict:
        return "mapping of names to values" if args[1] is Any else f"mapping of names to {describe(args[1])}"
    names = {bool: "true | false", int: "whole number", float: "number", str: "text", Bytes: A_SIZE}
    return names.get(kind, "null")


def choices(kind: Any) -> tuple[str, ...]:
    """The words of a Literal (or an optional one), for suggestions."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(word for arm in typing.get_args(kind) for word in choices(arm))
    return ()


def parse(node: yaml.Node, kind: Any) -> Any:
    """The node's value with this type; Mismatch says what was expected."""
    try:
        return _value(node, kind)
    except Twice as error:
        again = printable(str(error), 80)
        raise Mismatch(f"{describe(kind, full=True)}, each name once: `{again}` is given twice") from None
    except UNFIT:
        raise Mismatch(describe(kind, full=True) + _bad_item(node, kind)) from None


def _bad_item(node: yaml.Node, kind: Any) -> str:
    """`; item 2 is -1`: the first item of a list or mapping that does not fit; "" if it does not fit as a whole."""
    lists = [arm for arm in (kind, *typing.get_args(kind)) if typing.get_origin(arm) is list]
    mappings = [arm for arm in (kind, *typing.get_args(kind)) if typing.get_origin(arm) is dict]
    if lists and isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value, 1):
            try:
                _value(item, typing.get_args(lists[0])[0])
            except (*UNFIT, Twice):
                return f"; item {i} is {show(item)}"
    if mappings and isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            try:
                _value(key, str)
                _value(item, typing.get_args(mappings[0])[1])
            except (*UNFIT, Twice):
                joined = isinstance(key, yaml.ScalarNode) and is_null(item) and ":" in key.value
                return f"; {show(key)} is {show(item)}" + "; write a space after the colon" * joined
    return ""


def _value(node: yaml.Node, kind: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _inside(args[1], _value(node, args[0]))
    if origin in (typing.Union, types.UnionType):
        return _first(node, args)
    if origin is list and isinstance(node, yaml.SequenceNode) and node.value:
        return [_value(item, args[0]) for item in node.value]
    if origin is dict and isinstance(node, yaml.MappingNode) and node.value:
        return _once((_value(key, str), _value(item, args[1])) for key, item in node.value)
    if kind is Any:
        return _plain(node, [MOST_NODES])
    if origin is Literal and isinstance(node, yaml.ScalarNode) and node.tag != NULL_TAG:
        return args[args.index(node.value)]  # `none` too, where it is one of the words
    if origin in (list, dict) or not isinstance(node, yaml.ScalarNode) or is_null(node):
        raise ValueError("another kind of node")
    return _SCALARS[kind](node.value)


class Twice(Exception):
    """A name of a mapping is given twice; YAML's loaders would take the last in silence."""


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Twice(name)
        found[name] = value
    return found


def _first(node: yaml.Node, arms: tuple[Any, ...]) -> Any:
    """The value, with the first type of a union that can parse it."""
    if type(None) in arms and is_null(node):
        return None
    for arm in arms:
        try:
            return _value(node, arm)
        except UNFIT:
            continue
    raise ValueError("no arm fits")


def _plain(node: yaml.Node, left: list[int]) -> Any:
    """A JSON value by YAML's rules; each use of an alias counts, so that aliases cannot multiply. left: nodes still
    allowed."""
    left[0] -= 1
    if left[0] < 0:
        raise ValueError("too large")
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, left) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return _once((_value(key, str), _plain(item, left)) for key, item in node.value)
    value = yaml.SafeLoader("").construct_object(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a value of JSON")
    return value


def _inside(limit: Limit, value: Any) -> Any:
    if not limit.holds(value):
        raise ValueError(f"not {limit}")
    return value


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


_SCALARS: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: BOOLS[text.lower()],
    int: _parse_int,
    float: _parse_float,
    str: _parse_text,
    Bytes: lambda text: Bytes.parse(text),
}
