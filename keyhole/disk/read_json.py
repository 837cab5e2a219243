"""Reads a small JSON file of unknown origin, or reports what is wrong with it.

All possible faults of such a file are handled here: it is missing or unreadable, is not a regular file (a pipe would
block, a device never ends), is too large, is not UTF-8, not JSON, or nested too deeply for Python.
"""

import json
from pathlib import Path
from typing import Any

from keyhole.errors import UserError
from keyhole.machine.collector import no_collector

WORDS = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a yes or no", type(None): "null"}
LIMIT_BYTES = 2**28  # the index of a model with a million tensors has 100 MB


def read_json(path: Path, what: str, limit_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """The object in the file; UserError names `what` and the file otherwise."""
    try:
        if not path.is_file():
            raise OSError("there is no such file" if not path.exists() else "it is no ordinary file")
        size = path.stat().st_size
        if size > limit_bytes:
            raise ValueError(f"it has {size:,} bytes; at most {limit_bytes:,} are expected")
        with no_collector():
            found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds {WORDS[type(found)]}, where an object {{...}} is expected")
    except RecursionError:
        raise UserError(f"{what}: {path} cannot be read: its brackets are nested too deeply") from None
    except (OSError, ValueError) as error:  # bad JSON and bad UTF-8 are ValueErrors
        raise UserError(f"{what}: {path} cannot be read, it may be damaged or incomplete: {error}") from error
    return found
