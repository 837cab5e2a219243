"""A file of results that the user named (--json, --page): tried before the work, and not the end of it.

Scores of a large model take hours. So a place where nothing can be written is refused before they begin, by making a
file there; and where the disk is full in the end, the error says the results instead of dropping them.
"""

import tempfile
from pathlib import Path

from keyhole.disk.files import write_text
from keyhole.errors import UserError


def check_result_file(option: str, path: Path) -> None:
    """UserError where `path` cannot become a file. A temporary file is made beside it, and is gone again."""
    if path.is_dir():
        raise UserError(f"{option}: {path} is a directory; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written: {error.strerror or error}") from error


def write_result(option: str, path: Path, text: str, shown: str) -> None:
    """Writes the file. shown: what the user gets to see where that fails."""
    try:
        write_text(path, text)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{option}: {path} cannot be written: {why}; what it would have held:\n{shown}") from error
