"""Reads plain text files (.txt, .text, .md) as documents, for continued pre-training.

A file is one document, because line breaks do not say where a text begins: in a book they end lines, in a list they end
texts. A line that is only `<|endoftext|>` separates documents, as in published collections of short texts. A list of
short texts is written as JSONL, an object {"text": "..."} per line.

A document is longer than a sample. It is read in pieces of about a million characters, so a file of any size needs the
memory of a piece; collect.py cuts the tokens of a piece into samples of max_length. A piece ends at an empty line or,
if there is none for another million characters, at the end of a line; a longer line is divided at a space. So only the
last sample of a piece is short, and the tokens at its borders are nearly always those of the whole text. The end token
follows the last piece of a document. Empty lines at both ends of a document are removed.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from keyhole.data.opened import check_line, open_text
from keyhole.data.record import Record

SEPARATOR = "<|endoftext|>"
PIECE_CHARACTERS = 2**20


def read_documents(path: Path) -> Iterator[Record]:
    """The pieces of all documents of a file, as rows with the column `text`."""
    with open_text(path) as file:
        held: Record | None = None  # a piece that may be the last of its document
        for number, text in _pieces(file, path):
            if text is None:
                yield from [_closed(held)] if held else []
                held = None
            elif held and not text.strip():
                held.row["text"] += text
            elif text.strip():
                yield from [held] if held else []
                text = text if held else text.lstrip("\n")
                held = Record(str(path), "line", number, {"text": text}, is_document=True, ends=False)
        yield from [_closed(held)] if held else []


def _closed(last: Record) -> Record:
    return replace(last, row={"text": last.row["text"].rstrip("\n")}, ends=True)


def _pieces(file: TextIO, path: Path) -> Iterator[tuple[int, str | None]]:
    """The number of a piece's first line, and its text; None as a text where a document ends."""
    lines: list[str] = []
    size = first = 0
    for number, line in _lines(file, path):
        if line.strip() == SEPARATOR:
            yield first, "".join(lines)
            yield number, None
            lines, size = [], 0
            continue
        first = number if not lines else first
        lines.append(line)
        size += len(line)
        if size >= 2 * PIECE_CHARACTERS or (size >= PIECE_CHARACTERS and not line.strip()):
            yield first, "".join(lines)
            lines, size = [], 0
    yield first, "".join(lines)


def _lines(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; a line longer than a piece in parts, which begin with the space between two words."""
    number, left = 1, ""
    while part := file.readline(PIECE_CHARACTERS):
        check_line(part, path, number)
        line, left = left + part, ""
        if not line.endswith("\n") and len(part) == PIECE_CHARACTERS:
            at = line.rfind(" ", 1)
            line, left = (line[:at], line[at:]) if at > 0 else (line, "")
        yield number, line
        number += line.endswith("\n")
    if left:
        yield number, left
