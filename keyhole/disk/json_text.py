"""JSON that every program can read: numbers that are not finite are written as null.

Python writes `NaN` and `Infinity`, which are not JSON: jq, JavaScript, Go and most parsers refuse the whole file for
one of them. A perplexity is infinite from a loss of 710 on, and a diverged run has many such numbers. All files and
outputs that other programs may read are made here; readers of keyhole take null for "not finite".
"""

import json
import math
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
"""An object of JSON."""


def json_text(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """The value as strict JSON, without a line break at the end. default: as in json.dumps."""
    return json.dumps(strict(value), indent=indent, default=_strict_default(default), allow_nan=False)


def strict(value: Any) -> Any:
    """The value with None in the place of every float that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_key(key): strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value


def _key(key: Any) -> Any:
    return str(key) if isinstance(key, float) and not math.isfinite(key) else key


def _strict_default(default: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return None if default is None else lambda value: strict(default(value))
