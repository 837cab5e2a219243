"""The entries of run/metrics.jsonl, one JSON object per line; training/metrics.py describes their content."""

import json
import math
from pathlib import Path
from typing import Any

from keyhole.machine.host import read_text

Entry = dict[str, Any]


def is_test(entry: Entry) -> bool:
    """Whether an entry holds the metrics of the test questions."""
    return "test_questions" in entry


def read_metrics(path: Path) -> list[Entry]:
    """The entries of a metrics file; an incomplete line, as a killed run leaves it, is skipped."""
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[Entry], int]:
    """The entries of a metrics file, and the number of invalid lines before its last."""
    entries, unreadable = [], 0
    lines = read_text(path).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
        elif number < len(lines):
            unreadable += 1
    return entries, unreadable


LARGEST = 1e100  # larger values cannot be measurements, and their squares overflow


def finite(value: Any) -> float | None:
    """The value as a number; None if it is not a number, not finite, or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None
