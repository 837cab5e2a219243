"""The paths of `keyhole replay`, checked before torch is imported: the journal is there, OUT is free."""

from pathlib import Path

from keyhole.disk.files import try_place
from keyhole.errors import UserError
from keyhole.methods import METHODS


def journal_of(path: Path) -> Path:
    """The journal in an output directory, or the path itself."""
    return path / "run" / "journal" if (path / "run" / "journal").exists() else path


def check_journal(path: Path) -> Path:
    """The file of a journal; UserError if there is none."""
    path = journal_of(path)
    if path.is_dir():
        keep = ", ".join(row.name for row in METHODS.values() if row.journaled)
        raise UserError(f"JOURNAL: {path} has no run/journal; give the output_dir of a run that keeps one ({keep})")
    if not path.is_file():
        found = "no regular file" if path.exists() else "not there"
        raise UserError(f"JOURNAL: {path} is {found}; give a run's output_dir, or its run/journal")
    return path


def check_out(out: Path) -> None:
    """Refuses a place for the model that is not free, or cannot be written to."""
    if out.exists() and not out.is_dir():
        raise UserError(f"OUT: {out} is a file; choose a new directory")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"OUT: {out} exists and is not empty; choose a new directory")
    try:
        try_place(out)
    except OSError as error:
        raise UserError(f"OUT: {out} cannot be written: {error.filename}: {error.strerror}") from error
