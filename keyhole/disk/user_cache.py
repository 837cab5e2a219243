"""Files that make the next run start sooner, in a directory of the user's: found by content, bounded, safe to delete.

    $KEYHOLE_CACHE, or $XDG_CACHE_HOME/keyhole, or ~/.cache/keyhole

Nothing in it is needed: an entry that is missing, damaged or cannot be written is made again, or done without. Entries
are named by a hash of all that they depend on, appear by one rename, and end with a BLAKE2b-128 of their bytes, so
processes that run at the same time need no lock: both write the same bytes, and the last rename stays. An entry is
touched when it is read; after each write the least recently used go, until the others take at most MOST_BYTES.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from keyhole.disk.files import open_regular, remove

MOST_BYTES = 4 * 2**30  # of all entries of one kind
DIGEST_BYTES = 16
WRITING = ".writing-"


def cache_directory(kind: str) -> Path | None:
    """Where entries of this kind lie; None where the user has no place for them."""
    own, shared = os.environ.get("KEYHOLE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else Path(shared) / "keyhole" if shared else Path("~/.cache/keyhole").expanduser()
    return root / kind if root.is_absolute() else None


def write_entry(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """The entry, whole or not at all; OSError where that is not possible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(path)  # one that could not be read, whatever it is
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=WRITING)
    try:
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def open_entry(path: Path) -> BinaryIO:
    """An entry to read from, now the most recently used; OSError where there is none."""
    file = os.fdopen(open_regular(path, os.O_RDONLY), "rb")
    with suppress(OSError):
        os.utime(file.fileno())
    return file


def read_entry(path: Path) -> bytes | None:
    """The content of a small entry; None where there is none that can be trusted."""
    try:
        with open_entry(path) as file:
            content = file.read()
    except OSError:
        return None
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return body if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() == digest else None


def trim(directory: Path, most_bytes: int = MOST_BYTES) -> None:
    """Deletes the least recently used entries, until the others take at most so many bytes."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(directory):
            with suppress(OSError):  # gone meanwhile: another process trims
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


@cache
def digest_of_code(package: Path) -> bytes:
    """A hash of the Python source of a package: what other code has made is not found."""
    return digest_of_files(sorted(package.rglob("*.py")))
