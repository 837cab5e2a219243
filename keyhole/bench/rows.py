"""Tables of benchmark cases: YAML files, shipped (tables/) or the user's own, whose rows become dataclasses.

A row is checked against the types of the dataclass's fields; `one_of` limits a field to some words. Errors name the
file, the row and the key.
"""

from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from pathlib import Path
from reprlib import repr  # shortens deeply nested aliases
from typing import Any, TypeVar, get_type_hints

import yaml

from keyhole.config.loader import read_limited
from keyhole.errors import UserError

TABLES = Path(__file__).parent / "tables"
T = TypeVar("T")


def one_of(words: Iterable[str], **options: Any) -> Any:
    """A field whose value is one of these words."""
    return field(metadata={"one_of": tuple(words)}, **options)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping at the top of a file."""
    try:
        found = yaml.safe_load(read_limited(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"--table: cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: a mapping is needed at the top; the tables in {TABLES} are examples")
    return found


def list_of(found: dict[str, Any], key: str, where: str) -> list[Any]:
    """The non-empty list under a key."""
    if not isinstance(found.get(key), list) or not found[key]:
        raise UserError(f"{where}: a list `{key}` is needed; the tables in {TABLES} are examples")
    return list(found[key])


def row_as(kind: type[T], row: Any, where: str) -> T:
    """The row as a dataclass, every key and value checked."""
    own: Any = kind  # a dataclass
    types, known = get_type_hints(kind), {f.name: f for f in fields(own)}
    if not isinstance(row, dict):
        raise UserError(f"{where}: {repr(row)} is no row; a row has the keys {', '.join(known)}")
    for key, value in row.items():
        if key not in known:
            raise UserError(f"{where}: {key!r} is not one of {', '.join(known)}")
        words = known[key].metadata.get("one_of")
        if not isinstance(value, types[key]) or (isinstance(value, bool) and types[key] is not bool):
            raise UserError(
                f"{where}: {key}: {repr(value)} is not of type {getattr(types[key], '__name__', types[key])}"
            )
        if words is not None and value not in words:
            raise UserError(f"{where}: {key}: {repr(value)} is not one of {', '.join(words)}")
    required = [f.name for f in fields(own) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [key for key in required if key not in row]:
        raise UserError(f"{where}: {missing[0]!r} is missing")
    return kind(**row)
