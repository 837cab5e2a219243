"""One process per output directory: a run holds an operating-system lock on run/lock while it writes there.

Two processes that train into the same output_dir would delete each other's checkpoints. The lock is the kernel's
(flock), not the file's existence: it ends with the process, however the process dies, so there are no stale locks. The
file contains the process id, for the message, and is not deleted. Anything else under that name (a link, a file with
other content) is refused, not overwritten.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from keyhole.disk.files import open_regular
from keyhole.errors import UserError
from keyhole.ranks.join import others_launched

CONTENT = re.compile(rb"[\d\0]{0,20}\n?")


class Lock:
    """A lock that is acquired once, as soon as its directory exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: int | None = None

    @property
    def held(self) -> bool:
        return self.file is not None

    def take(self) -> None:
        """Acquires the lock if its directory exists and we do not hold it yet; UserError names the holder."""
        if self.held or not self.path.parent.is_dir():
            return
        try:
            file = open_regular(self.path, os.O_RDWR | os.O_CREAT)
            content = os.pread(file, 32, 0)
        except OSError as error:
            raise UserError(f"output_dir: cannot write to {self.path}: {error.strerror}") from error
        if not CONTENT.fullmatch(content):
            os.close(file)
            raise UserError(
                f"output_dir: {self.path} is no lock of keyhole, and stays as it is; choose another output_dir"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = content.decode().strip("\0\n") or "unknown"
            os.close(file)
            root = self.path.parent.parent
            launched = others_launched()
            hint = "" if launched is None else f" ({launched}: processes train together under torchrun only)"
            raise UserError(
                f"output_dir: process {holder} is training into {root} already{hint}; wait for it, stop it, or choose "
                "another output_dir"
            ) from None
        except OSError:  # a file system without locks: train without one
            pass
        with suppress(OSError):  # a full disk: the process id is for messages only
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self.file = file

    def release(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


@contextmanager
def locked(path: Path) -> Iterator[Lock]:
    """A lock that is released at the end, also after an error."""
    lock = Lock(path)
    try:
        yield lock
    finally:
        lock.release()
