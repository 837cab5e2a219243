"""Maps the columns of a row to the task's own names, for every known download of a data set.

lists opened     `rows: [data, data.paragraphs]`: the row is repeated for each item of the list at a path, and the
                 item replaces the list. A path that leads to no list is ignored, so that flat rows
                 (Hugging Face's) can use the same task file.
names            `question: [question, passage.questions.question]`: the first that exists; dots lead into
                 objects, unless a column has exactly this name
no label         rows whose label is missing, -1, - or empty (the test sets of benchmarks, MNLI's disputed pairs)
                 are left out and counted; unless the task file lists -1 or - as a label, or its candidates are
                 numbers that begin at -1 or below
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from keyhole.data.record import Record
from keyhole.data.tasks.spec import TaskSpec
from keyhole.errors import UserError, listed

MISSING = object()
NO_LABEL = ("", "-", "-1", "none", "null")


def pick_all(records: Iterable[Record], spec: TaskSpec, left_out: Counter[str]) -> Iterator[Record]:
    """Rows with only the task's columns. left_out: counts rows without a label."""
    column = spec.value or "label"
    unlabelled = _unlabelled(spec)
    for record in records:
        opened = _opened([record.row], spec.rows)
        for part, row in enumerate(opened, 1):
            picked = _pick(replace(record, row=row, part=part if len(opened) > 1 else 0), spec)
            if column in spec.columns and spelled(picked.row[column]) in unlabelled and column not in spec.optional:
                left_out["without a label"] += 1
            else:
                yield picked


def _unlabelled(spec: TaskSpec) -> set[str]:
    """The spellings that mean that a row has no label."""
    known = {word for words in spec.labels for word in words}
    if spec.value is not None and isinstance(spec.candidates, tuple):
        known |= {"-1"} if any(_is_negative(text) for text in spec.candidates) else set()
    return set(NO_LABEL) - known


def _is_negative(text: str) -> bool:
    try:
        return float(text) <= -1
    except ValueError:
        return False  # refused where questions are built


def spelled(value: Any) -> str:
    """A label as text: true and True are the same, and so are 1, 1.0 and "1"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip().lower()
    return text[:-2] if text.endswith(".0") and text[:-2].removeprefix("-").isdecimal() else text


def lookup(row: Any, path: str) -> Any:
    """The value of a column or at a dotted path; MISSING if there is none."""
    if isinstance(row, dict) and path in row:
        return row[path]
    head, dot, rest = path.partition(".")
    return lookup(row[head], rest) if dot and isinstance(row, dict) and head in row else MISSING


def _opened(rows: list[dict[str, Any]], paths: tuple[str, ...]) -> list[dict[str, Any]]:
    for path in paths:
        rows = [opened for row in rows for opened in _items(row, path)]
    return rows


def _items(row: dict[str, Any], path: str) -> list[dict[str, Any]]:
    if path == "*":
        values = list(row.values())
        return values if values and all(isinstance(value, dict) for value in values) else [row]
    found = lookup(row, path)
    return [_with(row, path, item) for item in found] if isinstance(found, list) else [row]


def _with(row: dict[str, Any], path: str, item: Any) -> dict[str, Any]:
    """A copy of the row with another value at this path."""
    head, _, rest = path.partition(".")
    return {**row, path: item} if path in row else {**row, head: _with(row[head], rest, item)}


def _pick(record: Record, spec: TaskSpec) -> Record:
    picked = {}
    for name, aliases in spec.columns.items():
        value = next((found for alias in aliases if (found := lookup(record.row, alias)) is not MISSING), MISSING)
        if value is MISSING and name not in spec.optional:
            also = f" (also called {listed(aliases[1:])})" if len(aliases) > 1 else ""
            raise UserError(
                f"{record.where}: task {spec.name} needs the column {aliases[0]}{also}; found: {listed(record.row)}. "
                f"{_instead(record.row, aliases)}, or give its name in the data in `columns: {{{name}: ...}}` of a "
                "task file of your own (docs/tasks.md)"
            )
        picked[name] = None if value is MISSING else value
    return replace(record, row=picked)


def _instead(row: dict[str, Any], aliases: tuple[str, ...]) -> str:
    """What to do about a missing column: a file of cells has no objects for a dotted path to lead into."""
    has_objects = any(isinstance(value, dict | list) for value in row.values())
    if has_objects or not all("." in alias for alias in aliases):
        return "Rename it"
    *outer, last = aliases[0].split(".")
    example = "".join(f'{{"{key}": ' for key in outer) + f'{{"{last}": ...' + "}" * (len(outer) + 1)
    return (
        "It is inside an object, which the cells of a CSV or TSV cannot hold: give the rows as JSONL, JSON or Parquet, "
        f"with {example} in each"
    )
