"""JSON of unknown origin as typed values: dataclasses, lists, tuples, numbers with bounds.

    decode(found, Result)            all of it is of its type, or ValueError
    decode(found, Story, most=4000)  what does not fit is left out, and texts, lists and objects are cut at `most`

Names that a dataclass does not have are passed over; those that are missing have their defaults.
"""

import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

LARGEST = 1e100  # larger values cannot be measurements, and their squares overflow


def finite(value: object) -> float | None:
    """The value as a number; None if it is not a number, not finite, or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None


def decode(value: Any, kind: Any, most: int | None = None) -> Any:
    """The JSON value as one of this type; ValueError if it is none."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        found = decode(value, args[0], most)
        if not args[1].holds(found):
            raise ValueError(f"not {args[1].describe()}")
        return found
    if origin in (typing.Union, types.UnionType):
        for arm in args[:-1]:
            with suppress(ValueError):
                return decode(value, arm, most)
        return decode(value, args[-1], most)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind, include_extras=True)
        try:
            return kind(**_each([(name, value[name], hints[name]) for name in hints if name in value], most))
        except TypeError as error:  # a field without a default is missing
            raise ValueError(str(error)) from None
    if origin is dict and isinstance(value, dict):
        return _each([(name[:most], each, args[1]) for name, each in itertools.islice(value.items(), most)], most)
    if origin is list and isinstance(value, list):
        return list(_each([(i, each, args[0]) for i, each in enumerate(value[:most])], most).values())
    if origin is tuple and isinstance(value, list) and len(value) == len(args):
        return tuple(decode(each, arm, most) for each, arm in zip(value, args, strict=True))
    if kind is str and isinstance(value, str):
        return value[:most]
    if type(value) is kind or kind is float:
        if kind in (bool, types.NoneType) or finite(value) is not None:
            return value
    raise ValueError(f"not {kind}")


def _each(parts: Iterable[tuple[Any, Any, Any]], most: int | None) -> dict[Any, Any]:
    """The parts of a value by their names; those that do not fit are left out, or refused if nothing may be."""
    found = {}
    for name, value, kind in parts:
        try:
            found[name] = decode(value, kind, most)
        except ValueError:
            if most is None:
                raise
    return found
