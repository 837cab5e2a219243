"""Durable writes: under a temporary name, flushed to the disk, then moved into place with one rename.

A reader sees either the old or the new file or directory, also after a power cut: the data are flushed before the
rename, and the parent directory after it. Temporary names start with a dot:

    .NAME.tmp             a file that is being written
    .NAME.saving-PID      a directory that is being written
    .NAME.old-PID         a directory that is being replaced, if the system cannot exchange two names

A temporary file is in the directory of its final name, so that no rename crosses file systems. Files are created
exclusively, and links are not followed, so nobody with write access to the directory can make this process write
elsewhere. A killed process leaves temporary files; the next run deletes them (training/rundir.py).
"""

import ctypes
import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from keyhole.errors import UserError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of Linux's renameat2
PIECES = 256
KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of Linux


def flush(path: Path) -> None:
    """Makes a file, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_all(directory: Path) -> None:
    """Makes a directory and everything in it durable."""
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)


def make_directories(path: Path) -> None:
    """Makes a directory and its missing parents, and makes their names durable."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a parent that is writable but not readable
            flush(place.parent)


def try_place(path: Path) -> None:
    """OSError if a directory cannot be created at `path`, or in it if it exists. Creates an unnamed file in the nearest
    existing directory, so that nothing is left if the process is killed. If the file system has no unnamed files,
    creates a directory and removes it again. Permissions are not enough to tell whether a directory is writable: those
    of /proc let root write."""
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    try:
        os.close(os.open(place, os.O_WRONLY | getattr(os, "O_TMPFILE", os.O_DIRECTORY), 0o600))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT) or not place.is_dir():
            raise OSError(error.errno, error.strerror, str(place)) from None
        try:
            (place / ".probe.tmp").mkdir(exist_ok=True)
            (place / ".probe.tmp").rmdir()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(place)) from None


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file. OSError for a link, which is not followed, a device or a pipe."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_small(path: Path, limit_bytes: int) -> bytes:
    """The content of a regular file of at most this size; OSError otherwise. Follows links: it only reads."""
    with os.fdopen(open_regular(path.resolve(), os.O_RDONLY), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > limit_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, {limit_bytes:,} at most are read", str(path))
        return file.read()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `path` atomically and durably when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process, or a link
    create = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, create, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replaces a small text file."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def staged(parent: Path, name: str) -> Iterator[Path]:
    """An empty directory in `parent` that will be renamed to `name`; deleted at the end if it was not moved."""
    make_directories(parent)
    temporary = parent / f".{name}.saving-{os.getpid()}"
    remove(temporary)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Deletes a directory with everything in it, or a link, file or pipe; what cannot be deleted is left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def replace_directory(new: Path, path: Path) -> None:
    """Moves `new` to `path`; deletes what had that name before.

    If the system can exchange two names (Linux), there is always a complete directory at `path`. Elsewhere two renames
    are needed, and a crash between them leaves the old directory as .NAME.old-PID, which `restore` renames back.
    """
    if not os.path.lexists(path):
        os.replace(new, path)
        flush(path.parent)
    elif exchange(new, path):
        flush(path.parent)
        remove(new)
    else:
        old = path.parent / f".{path.name}.old-{os.getpid()}"
        os.replace(path, old)
        try:
            os.replace(new, path)
        except OSError:
            os.replace(old, path)
            raise
        flush(path.parent)
        remove(old)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; False if this system or file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one))


class Appender:
    """Appends pieces (records, lines) to an open file, from the offset `end` on. Not thread-safe.

    The file always ends with a complete piece: one that was written only in part is cut off again. A piece that a full
    disk refuses is kept and written before the next one; waiting pieces are tried again at every append, PIECES of them
    at a time, so that a disk that stays full costs only one failed write per append. taken is called with every piece
    that the operating system has accepted.

    ahead: bytes of disk space that are reserved behind the end of the file, where the system can do that (Linux; not
    every file system): a disk that others fill up still takes that much. The file's size does not show the space, and
    `release` gives it back."""

    def __init__(
        self, file: int, end: int, taken: Callable[[bytes], None] = lambda piece: None, ahead: int = 0
    ) -> None:
        self.file, self.end, self.taken, self.ahead = file, end, taken, ahead
        self.pending: deque[bytes] = deque()
        self.reserved = end
        self._reserve()

    def _reserve(self) -> None:
        """Keeps at least half of `ahead` reserved; what the disk does not give is not asked for again until then."""
        if self.ahead and self.end + self.ahead // 2 >= self.reserved:
            reserve(self.file, self.end, self.ahead)
            self.reserved = self.end + self.ahead

    def release(self) -> None:
        """Gives the reserved space back, before the file is closed."""
        if self.ahead:
            self._cut()

    def append(self, piece: bytes) -> None:
        """Writes a piece. OSError: the write failed, and the piece waits for the next call."""
        self.pending.append(piece)
        self.write_pending()

    def write_pending(self) -> None:
        """Writes the waiting pieces. OSError: some of them still wait."""
        while self.pending:
            pieces = list(islice(self.pending, PIECES))
            data, end = b"".join(pieces), self.end
            try:
                size = os.pwrite(self.file, data, end)
            except OSError:
                self._cut()
                raise
            for piece in pieces:
                if self.end + len(piece) > end + size:
                    break
                self.end += len(piece)
                self.taken(self.pending.popleft())
            if size < len(data):
                self._cut()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._reserve()

    def _cut(self) -> None:
        with suppress(OSError):  # the next write starts at `end` in any case
            os.ftruncate(self.file, self.end)  # also gives reserved space back
            self.reserved = self.end


def reserve(file: int, start: int, size: int) -> bool:
    """Reserves disk space from an offset on, without changing the size of the file; False if that is not possible."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError):
        return False
    return bool(call(file, KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(size)) == 0)


@contextmanager
def writing_to(root: Path) -> Iterator[None]:
    """An error of the disk is one of the user's output_dir."""
    try:
        yield
    except OSError as error:
        raise UserError(f"output_dir: cannot write to {root}: {error.strerror}") from error
