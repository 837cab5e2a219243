"""The directory of a comparison: whether it may be written to, and since when the comparison runs.

comparison.json marks the directory as written by `keyhole compare`: only such a directory, or a new or empty one, is
used. It also holds the day on which the comparison began, which chat templates that print the date get in every run, so
that runs of different days train on the same tokens. A marker that cannot be read counts as new.
"""

import datetime
import json
from contextlib import suppress
from pathlib import Path

from keyhole.compare.file import Comparison
from keyhole.data.settings import today
from keyhole.disk.files import read_small, write_text
from keyhole.disk.json_text import json_text
from keyhole.errors import UserError
from keyhole.training import rundir

MARKER = "comparison.json"
FORMAT = 1
MOST_MARKER_BYTES = 2**20


def inspect(root: Path) -> None:
    """Refuses a directory with other files, and one that is not writable."""
    if root.exists() and not root.is_dir():
        raise UserError(f"output_dir: {root} is a file; choose a directory")
    strangers = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if strangers and not (root / MARKER).is_file():
        raise UserError(
            f"output_dir: {root} holds files that no comparison wrote (such as {strangers[0]}); choose a new directory"
        )
    rundir.try_place(root)


def take(root: Path, comparison: Comparison, day: str) -> None:
    """Creates the directory with its marker. day: the day on which the comparison began."""
    try:
        (root / "runs").mkdir(parents=True, exist_ok=True)
        about = {"format": FORMAT, "title": comparison.title, "source": comparison.source, "day": day}
        write_text(root / MARKER, json_text(about) + "\n")
    except OSError as error:
        raise UserError(f"output_dir: cannot write to {root}: {error.strerror}") from error


def day_of(root: Path) -> str:
    """The day on which the comparison began, from its marker; today, if there is no marker yet."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        return datetime.date.fromisoformat(json.loads(read_small(root / MARKER, MOST_MARKER_BYTES))["day"]).isoformat()
    return today().isoformat()
