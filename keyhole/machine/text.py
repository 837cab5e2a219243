"""Makes text from files safe to print: a terminal must show it, never interpret it.

printable(text)         one line: characters that are not printable become escapes (`\\x1b`), cut at a limit (that
                        of errors.py keeps the lines of a message)
without_controls(text)  a text of many lines (an answer): control characters other than line breaks and tabs removed
duration(seconds)       a readable time
counted(number, noun)   `1 row`, `2,000 rows`
aligned(rows)           the lines of a table
markdown(header, rows)  the same in Markdown
last_parts(paths)       names of paths
"""

import re
from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path

from keyhole import errors

LINE_CHARACTERS = 2000
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # except tabs and line breaks


def printable(text: object, limit: int = LINE_CHARACTERS) -> str:
    """The text on one line, safe for a terminal; cut after `limit` characters, with the number of omitted ones."""
    return errors.printable(text, limit, kept="")


def without_controls(text: str) -> str:
    """The text without control characters other than line breaks and tabs."""
    return CONTROLS.sub("", text)


def duration(seconds: float) -> str:
    """`45 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    whole = max(0, round(seconds))
    for (large, of_large), (small, of_small) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if whole >= of_large:
            return f"{whole // of_large} {large} {whole % of_large // of_small} {small}"
    return f"{whole} s"


def counted(number: int, noun: str) -> str:
    """A number with its noun, which gets an s unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """The lines of a table for a terminal. left: columns of text; the others are numbers, flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(widths[i]) if i in left else text.rjust(widths[i]) for i, text in enumerate(row)).rstrip()
        for row in rows
    ]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """A Markdown table whose columns are also aligned as plain text. numbers: all columns but the first are flush
    right."""
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        [c.rjust(w) if numbers and i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in cells
    ]
    lines.insert(1, ["-" * (w - 1) + (":" if numbers and i else "-") for i, w in enumerate(widths)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def last_parts(paths: Sequence[str | PathLike[str]]) -> list[str]:
    """A name for each path: as many of its last parts as distinguish it from the others."""
    parts, names = [Path(path).parts for path in paths], []
    for i, own in enumerate(parts):
        others = [each for j, each in enumerate(parts) if j != i]
        depth = next((n for n in range(1, len(own)) if all(own[-n:] != each[-n:] for each in others)), len(own))
        names.append(str(Path(*own[-depth:])) if own else str(paths[i]))
    return names
