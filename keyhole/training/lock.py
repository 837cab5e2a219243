"""One process a directory: run/lock is held, by the operating system, as long as a run writes here.

Two processes that train into the same output_dir would delete each other's checkpoints. The lock is the kernel's
(flock), not the file's existence: it ends with the process, however that dies, so there is nothing to clean up
and no stale lock. The file holds the number of the process, for the message, and stays.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keyhole.errors import UserError


class Lock:
    """A lock that is taken once, as early as its directory exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: int | None = None

    def take(self) -> None:
        """Takes the lock if its directory exists and it is not ours yet; UserError names who holds it."""
        if self.file is not None or not self.path.parent.is_dir():
            return
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"output_dir: cannot write to {self.path.parent}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 32).decode(errors="replace").strip() or "unknown"
            os.close(file)
            root = self.path.parent.parent
            raise UserError(
                f"output_dir: process {holder} is training into {root} already; wait for it, stop it, or choose "
                "another output_dir"
            ) from None
        except OSError:  # a file system without locks: nothing to be done, and no reason not to train
            pass
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self.file = file

    def release(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


@contextmanager
def locked(path: Path) -> Iterator[Lock]:
    """A lock that is released at the end, whatever happens."""
    lock = Lock(path)
    try:
        yield lock
    finally:
        lock.release()
