"""Values that no file should hold where others are expected, and JSON files that hold one of them."""

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 10**18, 10**400, 1e308, -1e308, float("nan"), float("inf"), 0.5]
ODD += ["", "a", ESCAPE, "../../etc/passwd", "x" * 100_000, "\ud800", "\0"]
ODD += [[], [[]], {}, {"a": {"b": []}}, [1, "a", None], [0] * 1000, {ESCAPE: ESCAPE}]
odd = st.sampled_from(ODD)


def places_of(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value in a tree of JSON, those of containers too; of a list the first three."""
    inner: list[Any] = (
        list(tree) if isinstance(tree, dict) else list(range(len(tree)))[:3] if isinstance(tree, list) else []
    )
    return [at] * bool(at) + [place for key in inner for place in places_of(tree[key], (*at, key))]


def with_value(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A copy of the tree with another value at one place."""
    found = copy.deepcopy(tree)
    inner = found
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return found


def write_json(path: Path, value: Any) -> None:
    """As JSON that no library refuses to write: NaN, numbers of 400 digits, half characters."""
    path.write_text(json.dumps(value), encoding="utf-8")
