"""The user's cache directory: files that make the next run start sooner, identified by content, limited in size.

    $KEYHOLE_CACHE, or $XDG_CACHE_HOME/keyhole, or ~/.cache/keyhole

The cache may be deleted at any time: an entry that is missing, damaged or not writable is recomputed. Entries are named
by a hash of everything that they depend on, are put in place with one rename, and have checksums of their own, so
concurrent processes need no lock: they write the same bytes, and the last rename wins. Reading an entry updates its
time; after each write the least recently used entries are deleted until the rest takes at most MOST_BYTES.
"""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

MOST_BYTES = 4 * 2**30  # limit for all entries of one kind
DIGEST_BYTES = 16


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
