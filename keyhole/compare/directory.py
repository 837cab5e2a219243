"""The directory of a comparison: whether it may be written to, since when the comparison runs, and what has changed.

comparison.json marks the directory as written by `keyhole compare`: only such a directory, or a new or empty one, is
used. It also holds the day on which the comparison began, which chat templates that print the date get in every run, so
that runs of different days train on the same tokens; and hashes of the models, to report that one has changed. A marker
that cannot be read counts as new.
"""

import datetime
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keyhole.compare.file import Comparison
from keyhole.data.settings import today
from keyhole.disk.files import read_small, write_text
from keyhole.disk.json_text import json_text
from keyhole.errors import UserError
from keyhole.machine.text import printable
from keyhole.training import rundir

MARKER = "comparison.json"
FORMAT = 1
MOST_MARKER_BYTES = 2**20


def inspect(root: Path) -> None:
    """Refuses a directory with other files, and one that is not writable."""
    rundir.check_place(root)
    if root.exists() and not root.is_dir():
        raise UserError(f"output_dir: {root} is a file; choose a directory")
    strangers = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if strangers and not (root / MARKER).is_file():
        raise UserError(
            f"output_dir: {root} holds files that no comparison wrote (such as {strangers[0]}); choose a new directory"
        )
    rundir.try_place(root)


def take(root: Path, comparison: Comparison, day: str, models: dict[str, str | None]) -> None:
    """Creates the directory with its marker; one that is there stays until the directory is locked."""
    with _writing_to(root):
        (root / "runs").mkdir(parents=True, exist_ok=True)
    if not (root / MARKER).is_file():
        mark(root, comparison, day, models)


def mark(root: Path, comparison: Comparison, day: str, models: dict[str, str | None]) -> None:
    """Writes the marker. day: the day on which the comparison began; models: their hashes, by name."""
    about = {"format": FORMAT, "title": comparison.title, "source": comparison.source, "day": day, "models": models}
    with _writing_to(root):
        write_text(root / MARKER, json_text(about) + "\n")


@contextmanager
def _writing_to(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"output_dir: cannot write to {root}: {error.strerror}") from error


def day_of(root: Path) -> str:
    """The day on which the comparison began, from its marker; today, if there is no marker yet."""
    with suppress(ValueError, TypeError, KeyError):
        return datetime.date.fromisoformat(_marker(root)["day"]).isoformat()
    return today().isoformat()


def changes(root: Path, comparison: Comparison, models: dict[str, str | None]) -> list[str]:
    """Lines about what differs from the comparison that was here before: its files will be replaced, or runs be done
    again."""
    before = _marker(root)
    known = before.get("models")
    lines = [
        f"{name}: the model has changed since the last time; its runs are done again"
        for name, content in models.items()
        if isinstance(known, dict) and known.get(name, content) != content
    ]
    title = before.get("title", comparison.title)
    if title != comparison.title and before.get("source") != comparison.source:
        lines.append(
            f"{root} has the tables of another comparison, {printable(title)}: they are replaced, its results stay"
        )
    return lines


def _marker(root: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_small(root / MARKER, MOST_MARKER_BYTES))
        return found if isinstance(found, dict) else {}
    return {}
