"""The directory of a run is deleted, moved or unmounted while the run trains.

The next save creates output_dir again, so the model is not lost. But the open files (metrics.jsonl, the journal) stay
with the old directory, and the new one lacks the marker without which a run cannot be resumed there. So before every
save, and once a minute, run/, its marker and its metrics are compared with those at the beginning of the run, by device
and inode. If one has gone, this is said once, and the new run/ gets marker, settings, environment and a lock of its
own. A directory in which another run has begun meanwhile is refused: no save mixes two runs.
"""

import os
from collections.abc import Callable
from pathlib import Path

from keyhole.disk.files import make_directories
from keyhole.errors import UserError
from keyhole.training.lock import Lock
from keyhole.training.rundir import RunDir

Identity = tuple[int, int] | None


class Renewal:
    """Watches the directory of one run. lock: the one that the run holds; write: writes marker, settings and
    environment into run/."""

    def __init__(self, directory: RunDir, run_id: str | None, lock: Lock, write: Callable[[], None]) -> None:
        self.directory, self.run_id, self.lock, self.write = directory, run_id, lock, write
        self.known: list[Identity] | None = _identities(directory)

    def __call__(self) -> list[str]:
        """Lines for the user if run/ is another directory than before, which is made usable; UserError if that is
        another run's."""
        try:
            if _identities(self.directory) == self.known:
                return []
            is_theirs = self.directory.is_ours and self.directory.run_id != self.run_id
        except OSError:  # it cannot be looked at: a save reports why
            return []
        if is_theirs:
            raise UserError(
                f"output_dir: another run has begun in {self.directory.root} since this one's directory was deleted or "
                "moved; move that one away, or move this one's back"
            )
        is_news = self.known is not None
        self.known = self._make()
        if not is_news:
            return []
        return [
            f"warning: {self.directory.run}, or a file in it, was deleted, moved or unmounted: its metrics, log and "
            f"journal go on where it was moved to, or are lost; checkpoints and the model go to {self.directory.root}"
        ]

    def _make(self) -> list[Identity] | None:
        """Makes run/ again; None if that fails, for which a save reports the reason."""
        try:
            make_directories(self.directory.run)
            self.lock.release()
            self.lock.take()
            self.write()
            return _identities(self.directory)
        except OSError:
            return None


def _identities(directory: RunDir) -> list[Identity]:
    """Device and inode of run/, the marker and the metrics, none of which a run replaces."""
    return [_identity(path) for path in (directory.run, directory.marker, directory.metrics)]


def _identity(path: Path) -> Identity:
    """Device and inode; None if there is nothing of that name."""
    try:
        about = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return about.st_dev, about.st_ino
