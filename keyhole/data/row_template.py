"""Builds texts from the columns of a row: `prompt: "{sentence} It was"` turns any table into training data.

    {sentence}     the cell of that column; a name may have spaces and dots ({Customer name})
    {{ and }}      a brace

Texts are inserted unchanged, numbers and booleans as in JSON, dates as 2025-01-31. A null, a NaN (a missing number of
pandas), a list, an object or a missing column is refused; an empty cell of a CSV is an empty text. Renamed columns
(`columns`) have their new names. Prompt and completion are joined byte for byte, so one of the two must contain the
space between them.
"""

import datetime
import difflib
import json
import math
import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

from keyhole.data.record import Record
from keyhole.errors import UserError, listed

PIECE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


class RowTemplate:
    """A parsed template; key: the name of its setting."""

    def __init__(self, text: str, key: str) -> None:
        self.key = key
        self.parts: list[tuple[str, str | None]] = []  # text, and the column after it
        literal, at = "", 0
        for match in PIECE.finditer(text):
            literal, at, found = literal + text[at : match.start()], match.end(), match[0]
            if found in ("{{", "}}"):
                literal += found[0]
            elif match[1] is None:
                raise UserError(
                    f"{key}: {text!r:.120} has a single {found} at character {match.start() + 1}; a column is "
                    f"{{name}}, a brace {found * 2}"
                )
            else:
                self.parts.append((literal, match[1].strip()))
                literal = ""
        self.parts.append((literal + text[at:], None))
        if len(self.parts) == 1:
            raise UserError(f"{key}: {text!r:.120} names no column; write one in braces, such as {{text}}")

    def fill(self, record: Record) -> str:
        """The text of a row."""
        return "".join(text if column is None else text + self._cell(record, column) for text, column in self.parts)

    def _cell(self, record: Record, column: str) -> str:
        if column not in record.row:
            close = difflib.get_close_matches(column, [str(name) for name in record.row], n=1)
            meant = f"; did you mean {{{close[0]}}}?" if close else ""
            raise UserError(
                f"{record.where}: {self.key}: there is no column {column!r}; found: "
                f"{listed(record.row) or 'none'}{meant}"
            )
        value: Any = record.row[column]
        if found := no_text(value):
            raise UserError(
                f"{record.where}: {self.key}: column {column!r} is {found}, which is no text; correct or remove the row"
            )
        return json.dumps(value) if isinstance(value, bool | int | float) else str(value)


def no_text(value: Any) -> str:
    """What a value is that has no text; empty if it has one. A missing number is NaN in the files of pandas; texts of
    Hive and Impala may be bytes in Parquet."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "null" if value is None else "not a number" if math.isnan(value) else "infinite"
    if isinstance(value, str):  # Jinja's too
        return ""
    kinds = {dict: "an object", list: "a list", tuple: "a list", bytes: "bytes", bool: "", int: "", float: ""}
    kinds |= dict.fromkeys((Decimal, datetime.date, datetime.datetime, datetime.time), "")
    return kinds.get(type(value), f"a {type(value).__name__}")


def filled(record: Record, templates: dict[str, RowTemplate]) -> Record:
    """The row with its own columns and those that the templates make."""
    return replace(record, row=record.row | {key: template.fill(record) for key, template in templates.items()})
