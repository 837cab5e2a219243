"""A result file that the user named (--json, --page): checked before the work, and results are not lost if it fails.

Scoring a large model takes hours. So a path that is not writable is refused before the work begins, by creating a file
there; and if the disk is full at the end, the error message contains the results instead of dropping them.

A file that is there already is replaced only if it is an earlier result, or empty: `--json train.jsonl` is a slip of
the hand, and must not cost the data. The beginning of a file tells:

    JSON    the keys that results begin with (`model`, `dtype`, `device`, `results`)
    page    the head that every page of keyhole/pages has

Anything that is no ordinary file is refused: a result is written under another name and renamed, which would replace a
pipe, a device (/dev/null, for root) or a link (/dev/stdout, also for root) by a file.
"""

import os
import re
import tempfile
from pathlib import Path

from keyhole.disk.files import write_text
from keyhole.errors import UserError

HEAD_BYTES = 2**16
RESULT = re.compile(rb'\{\s*(?:"(?:model|dtype|device)": "[^\n]*",\s*)*"results": ')
PAGE = re.compile(rb'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" ')


def check_result_file(option: str, path: Path) -> None:
    """UserError if `path` cannot be written, or holds something else than an earlier result. Creates a temporary file
    beside it, and deletes it again."""
    if path.is_dir():
        raise UserError(f"{option}: {path} is a directory; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
        replaces = os.path.lexists(path) and not _is_earlier(path)
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written: {error.strerror or error}") from error
    if replaces:
        what = "exists and is no earlier result" if path.is_file() else "is a pipe or a device"
        what = "is a link" if path.is_symlink() else what
        raise UserError(f"{option}: {path} {what}, and would be replaced; name another file, or move this one away")


def _is_earlier(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return not head or any(kind.match(head) for kind in (RESULT, PAGE))


def write_result(option: str, path: Path, text: str, shown: str) -> None:
    """Writes the file. shown: the text that is shown if that fails."""
    try:
        write_text(path, text)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{option}: {path} cannot be written: {why}; what it would have held:\n{shown}") from error
