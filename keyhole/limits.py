"""The types of settings, in a config and in Python: what a type says in words, and whether a value is of it.

Handled types: bool, int, float, str, Bytes, Literal, list[T], dict[str, T], T | None, T | U, and numbers with bounds,
`Annotated[int, Limit(1)]`, with names for the usual ones. `convert` walks through a type; what has no parts is a value
of Python here, and a word of a YAML file in config/types.py.
"""

import math
import types
import typing
from collections.abc import Callable
from contextlib import suppress
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

UNIONS = (typing.Union, types.UnionType)
WORDS: dict[object, str] = {bool: "true | false", int: "whole number", float: "number", str: "text", Bytes: A_SIZE}


def setting(default: object, doc: str) -> Any:
    """A field of a dataclass of settings with its line in the help and the docs."""
    return field(default=default, metadata={"doc": doc})


def required(doc: str) -> Any:
    """The same, without a default."""
    return field(metadata={"doc": doc})


def scalar(value: object, kind: object) -> object:
    """A value of Python as one of a type without parts, or ValueError."""
    if kind is Any:
        return value
    if typing.get_origin(kind) is Literal:
        is_one = isinstance(value, str) and value in typing.get_args(kind)
    elif kind is float or kind is int:
        is_number = isinstance(value, Real if kind is float else Integral) and not isinstance(value, bool)
        is_one = is_number and isinstance(value, Real) and math.isfinite(value)
    else:
        is_one = isinstance(kind, type) and isinstance(value, kind)
    if not is_one:
        raise ValueError(value)
    return value


def convert(
    value: object, kind: object, scalar: Callable[[object, object], object] = scalar, empty: bool = False
) -> Any:
    """The value as one of this type, or ValueError. scalar: reads what has no parts. empty: a list or a mapping may
    be."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        found = convert(value, args[0], scalar, empty)
        if not args[1].holds(found):
            raise ValueError(f"not {args[1].describe()}")
        return found
    if origin in UNIONS:
        for arm in args:  # null is the last one: `none` may be a word
            with suppress(ValueError):
                return convert(value, arm, scalar, empty)
    elif origin is list and isinstance(value, list | tuple) and (value or empty):
        return [convert(item, args[0], scalar, empty) for item in value]
    elif origin is dict and isinstance(value, dict) and (value or empty):
        return {key: convert(item, args[1], scalar, empty) for key, item in value.items()}
    elif origin not in (list, dict):
        return scalar(value, kind)
    raise ValueError("another kind of value")


def fits(value: object, kind: object) -> bool:
    try:
        convert(value, kind)
    except ValueError:
        return False
    return True


def describe(kind: object, full: bool = False) -> str:
    """The type in words, for the help and the docs page; full: with every bound, for error messages."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return f"{describe(args[0])} {args[1].describe(full)}"
    if origin is Literal:
        return " | ".join(args)
    if origin in UNIONS:
        return " or ".join(describe(arm, full) for arm in args)
    if origin is list:
        return f"list of {describe(args[0])}"
    if origin is dict:
        return "mapping of names to values" if args[1] in (object, Any) else f"mapping of names to {describe(args[1])}"
    return WORDS.get(kind, "null")


def choices(kind: object) -> tuple[str, ...]:
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    if typing.get_origin(kind) in UNIONS:
        return tuple(word for arm in typing.get_args(kind) for word in choices(arm))
    return ()


# What others call the dtypes; refused with our name for it
SPELLINGS = {
    "fp32": "float32", "float": "float32", "f32": "float32", "fp16": "float16", "half": "float16", "f16": "float16",
    "bf16": "bfloat16", "brain": "bfloat16",
}  # fmt: skip
