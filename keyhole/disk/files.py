"""Durable writes: under a temporary name, flushed to the disk, then moved into place with one rename.

A reader sees either the old or the new file or directory, also after a power cut: the data are flushed before the
rename, and the parent directory after it. Temporary names start with a dot:

    .NAME.tmp             a file that is being written
    .NAME.saving-PID      a directory that is being written

A temporary file is in the directory of its final name, so that no rename crosses file systems. Files are created
exclusively, and links are not followed, so nobody with write access to the directory can make this process write
elsewhere. A killed process leaves temporary files; the next run deletes them (training/rundir.py).

The user's cache directory: files that make the next run start sooner, identified by content, limited in size.

    $KEYHOLE_CACHE, or $XDG_CACHE_HOME/keyhole, or ~/.cache/keyhole

The cache may be deleted at any time: an entry that is missing, damaged or not writable is recomputed. Entries are named
by a hash of everything that they depend on, are put in place with one rename, and have checksums of their own, so
concurrent processes need no lock: they write the same bytes, and the last rename wins. Reading an entry updates its
time; after each write the least recently used entries are deleted until the rest takes at most MOST_BYTES.
"""

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from keyhole.errors import UserError

KEEP_SIZE = 1  # of Linux's fallocate
READ_BYTES = 4 * 2**20
READERS = 4
MOST_BYTES = 4 * 2**30  # limit for all entries of one kind
DIGEST_BYTES = 16


def flush(path: Path) -> None:
    """Makes a file, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_all(directory: Path) -> None:
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
    """OSError if a directory cannot be created at `path`, or in it if it exists: creates an unnamed file in the nearest
    existing directory. Permissions are not enough to tell whether it is writable: those of /proc let root write."""
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    try:
        tempfile.TemporaryFile(dir=place).close()
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


def reserve(file: int, start: int, size: int) -> None:
    """Reserves disk space from an offset on, without changing the file's size, where the system can do that (Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).fallocate64(file, KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(size))


@contextmanager
def writing_to(root: str | Path, key: str = "output_dir") -> Iterator[None]:
    """An error of the disk is one of what the user has named."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{key}: cannot write to {root}: {error.strerror or error}") from error


# -- checksums ---------------------------------------------------------------------------------------------------------


def crc_of(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def checksums(paths: list[Path]) -> list[str]:
    """Checksums of several files, read in parallel (zlib releases the GIL)."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(crc_of, paths))


# -- the user's cache --------------------------------------------------------------------------------------------------


def cache_directory(kind: str) -> Path | None:
    """The directory for entries of this kind; None if the user has no cache directory."""
    own, shared = os.environ.get("KEYHOLE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else Path(shared) / "keyhole" if shared else Path("~/.cache/keyhole").expanduser()
    return root / kind if root.is_absolute() else None


def trim(directory: Path, suffix: str, most_bytes: int = MOST_BYTES) -> None:
    """Deletes the least recently used entries, until the rest takes at most most_bytes. Files without the suffix of
    entries are not ours (KEYHOLE_CACHE may name a directory whose data/ is the user's), and stay."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(directory):
            if not entry.name.endswith((suffix, f"{suffix}.tmp")):  # the latter is left by a killed process
                continue
            with suppress(OSError):  # already deleted by another process
                about = entry.stat(follow_symlinks=False)
                found.append((about.st_mtime_ns, about.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most_bytes:
            return
        with suppress(OSError):
            os.unlink(path)
        total -= size


def digest_of_files(names: Iterable[str | Path]) -> bytes:
    """A hash of the contents of files, in this order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in names:
        with open(name, "rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.digest()


def versions(names: Iterable[str | Path]) -> list[tuple[int, ...]]:
    """What changes when a file is written to or replaced."""
    found = [os.stat(name) for name in names]
    return [(about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns) for about in found]


@cache
def digest_of_code(package: Path) -> bytes:
    """A hash of the Python source of a package, so that entries of other versions are not used."""
    return digest_of_files(sorted(package.rglob("*.py")))
