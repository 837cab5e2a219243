"""A result file that the user named (--json, --page): checked before the work, and results are not lost if it fails.

Scoring a large model takes hours. So a path that is not writable is refused before the work begins, by creating a file
there; and if the disk is full at the end, the error message contains the results instead of dropping them.
"""

import tempfile
from pathlib import Path

from keyhole.disk.files import write_text
from keyhole.errors import UserError


def check_result_file(option: str, path: Path) -> None:
    """UserError if `path` cannot be written. Creates a temporary file beside it, and deletes it again."""
    if path.is_dir():
        raise UserError(f"{option}: {path} is a directory; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written: {error.strerror or error}") from error


def write_result(option: str, path: Path, text: str, shown: str) -> None:
    """Writes the file. shown: the text that is shown if that fails."""
    try:
        write_text(path, text)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{option}: {path} cannot be written: {why}; what it would have held:\n{shown}") from error
