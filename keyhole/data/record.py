"""One row of a file of data, with its place in the file, so that every later error can say "train.jsonl, line 17".

A row has named columns, each once (`check_header`).
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.errors import UserError, listed


@dataclass(frozen=True, slots=True)
class Record:
    """One row and where it was found."""

    file: str
    unit: str  # "line", "row" or "item"
    number: int  # counted from 1
    row: dict[str, Any]
    source: int = 0  # index of its source
    part: int = 0  # which of the rows it was expanded into, from 1; 0: it is one row
    is_document: bool = False  # a piece of a plain text, which is longer than a sample
    ends: bool = True  # whether it is the last piece

    @property
    def where(self) -> str:
        return f"{self.file}, {self.unit} {self.number}" + (f", row {self.part} of it" if self.part else "")


def check_header(path: Path, header: list[str]) -> None:
    """Refuses two columns of one name: the rows would have only the second."""
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        named = listed(name or "(no name)" for name in twice)
        raise UserError(f"{path}: two columns are called {named}; rename one, or remove it")
