"""The types of settings, in a config and in Python: what a type says in words, and whether a value is of it.

Handled types: bool, int, float, str, Bytes, Literal, list[T], dict[str, T], T | None, T | U, and numbers with bounds,
`Annotated[int, Limit(1)]`, with names for the usual ones. `convert` walks through a type. How a value is taken apart is
the business of its `Source`: here values of Python, in config/types.py the nodes of a YAML file.
"""

import math
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from keyhole.machine.sizes import EXPECTED as A_SIZE
from keyhole.machine.sizes import Bytes


@dataclass(frozen=True)
class Limit:
    """Bounds of a number: low <= x <= high, or low < x where `above` is set."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value lies inside."""
        if self.low is not None and (value <= self.low if self.above else value < self.low):
            return False
        return self.high is None or value <= self.high

    def describe(self, full: bool = True) -> str:
        """`>= 1 and <= 4096`; not full: without a bound that nobody will meet, as the docs show it."""
        low = "" if self.low is None else f"{'> ' if self.above else '>= '}{_text(self.low)}"
        high = "" if self.high is None or (self.high == MOST and not full) else f"<= {_text(self.high)}"
        return " and ".join(part for part in (low, high) if part)


def _text(number: float) -> str:
    """`4096` and not `4.1e+03`."""
    return str(number) if isinstance(number, int) else f"{number:g}"


MOST = 10**9  # of anything that is counted: beyond it, a number is a slip of the keyboard
Count = Annotated[int, Limit(1, MOST)]
BatchSize = Annotated[int, Limit(1, 2**20)]
Rank = Annotated[int, Limit(1, 2**16)]  # of adapters; the model's matrices bound it further
Threads = Annotated[int, Limit(1, 1024)]
Seed = Annotated[int, Limit(0, 2**63 - 1)]
Positive = Annotated[float, Limit(0, above=True)]
NotNegative = Annotated[float, Limit(0)]
Fraction = Annotated[float, Limit(0, 1)]
BelowOne = Annotated[float, Limit(0, 0.999999)]

WORDS = {bool: "true | false", int: "whole number", float: "number", str: "text", Bytes: A_SIZE}


def setting(default: Any, doc: str) -> Any:
    """A field of a dataclass of settings with its line in the help and the docs."""
    return field(default=default, metadata={"doc": doc})


def required(doc: str) -> Any:
    """The same, without a default."""
    return field(metadata={"doc": doc})


class Twice(Exception):
    """A name of a mapping is given twice; YAML's loaders would take the last in silence."""


class Source:
    """Values that are given in Python."""

    unfit: tuple[type[Exception], ...] = (ValueError,)
    """Raised for a value that is not of a type."""

    def is_null(self, value: Any) -> bool:
        return value is None

    def items(self, value: Any) -> Sequence[Any] | None:
        """The items of a list; None if it is none."""
        return value if isinstance(value, list | tuple) else None

    def pairs(self, value: Any) -> Iterable[tuple[Any, Any]] | None:
        """Names and values of a mapping; None if it is none."""
        return value.items() if isinstance(value, dict) else None

    def scalar(self, value: Any, kind: Any) -> Any:
        """A value of a type without parts, or ValueError."""
        if kind is Any:
            return value
        if typing.get_origin(kind) is Literal:
            fits = isinstance(value, str) and value in typing.get_args(kind)
        elif kind is float or kind is int:
            is_number = isinstance(value, Real if kind is float else Integral) and not isinstance(value, bool)
            fits = is_number and math.isfinite(value)
        else:
            fits = isinstance(value, kind)
        if not fits:
            raise ValueError(value)
        return value


PYTHON = Source()


def convert(value: Any, kind: Any, source: Source = PYTHON) -> Any:
    """The value as one of this type; one of `source.unfit`, or Twice, if it is none."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        found = convert(value, args[0], source)
        if not args[1].holds(found):
            raise ValueError(f"not {args[1].describe()}")
        return found
    if origin in (typing.Union, types.UnionType):
        return _first(value, args, source)
    if origin is list and (items := source.items(value)):
        return [convert(item, args[0], source) for item in items]
    if origin is dict and (pairs := source.pairs(value)):
        found = {}
        for key, item in pairs:
            name = convert(key, str, source)
            if name in found:
                raise Twice(name)
            found[name] = convert(item, args[1], source)
        return found
    if origin in (list, dict):
        raise ValueError("another kind of value")
    return source.scalar(value, kind)


def _first(value: Any, arms: Sequence[Any], source: Source) -> Any:
    """The value, by the first type of a union that it fits; null only then (`none` may be a word)."""
    for arm in arms:
        try:
            return convert(value, arm, source)
        except source.unfit:
            continue
    if type(None) in arms and source.is_null(value):
        return None
    raise ValueError("no type of the union fits")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of Python is of the type."""
    try:
        convert(value, kind)
    except ValueError:
        return False
    return True


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
    return WORDS.get(kind, "null")


def choices(kind: Any) -> tuple[str, ...]:
    """The words of a Literal (or an optional one), for suggestions."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(word for arm in typing.get_args(kind) for word in choices(arm))
    return ()


# What others call the dtypes; refused with our name for it
SPELLINGS = {
    "fp32": "float32", "float": "float32", "f32": "float32", "fp16": "float16", "half": "float16", "f16": "float16",
    "bf16": "bfloat16", "brain": "bfloat16",
}  # fmt: skip
