"""The entries of run/metrics.jsonl, one JSON object per line; training/metrics.py describes their content."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
MOST_METRICS, MOST_LINE = 2**31, 2**16  # bytes


def is_test(entry: Entry) -> bool:
    return "test_questions" in entry


def read_metrics(path: Path) -> list[Entry]:
    """The entries of a metrics file; none if it cannot be read."""
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[Entry], int]:
    """The entries of a metrics file, and the number of lines that are left out."""
    try:
        found = list(entries(path))
    except OSError:
        return [], 0
    return [entry for entry in found if entry is not None], found.count(None)


def entries(path: Path) -> Iterator[Entry | None]:
    """The entries, read line by line; None for a line that is invalid or too long. A last line without its end, as a
    run leaves it that is writing or was killed, is passed over if it is no entry."""
    if path.stat().st_size > MOST_METRICS:
        raise OSError(f"it has {path.stat().st_size:,} bytes, more than any run writes")
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            while len(line) == MOST_LINE and not line.endswith(b"\n"):  # the rest of a line that is too long
                entry, line = None, file.readline(MOST_LINE)
            if isinstance(entry, dict) and type(entry.get("step")) is int and 0 <= entry["step"] < 2**53:
                yield entry
            elif line.endswith(b"\n") and line.strip():
                yield None
