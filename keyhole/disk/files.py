"""Durable writes: beside the place, flushed to disk, then moved into place by one rename.

A reader sees the old file or directory, or the new one, and after a power cut too: the data is flushed before
the rename, and the directory that holds the name after it. What a killed process leaves is a name that starts
with a dot and has its process number in it; rundir.py sweeps such names away.
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from keyhole.disk.crc import Span, crc_of

READERS = 4


def flush(path: Path) -> None:
    """Makes a file, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replaces a small text file, atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """An empty directory beside `path`; whatever has not been moved away in the end is deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.saving-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def flush_all(directory: Path) -> None:
    """Makes a directory and everything in it durable."""
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)


def replace_directory(new: Path, path: Path) -> None:
    """Moves `new` to `path`. What stood there is deleted once the new one has its name."""
    old = path.parent / f".{path.name}.old-{os.getpid()}"
    if path.exists():
        os.replace(path, old)
    os.replace(new, path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def crc32(path: Path, known: list[Span] | None = None) -> str:
    """Checksum of a file's content, eight hex digits; of known pieces it is not read again."""
    return f"{crc_of(path, known or []):08x}"


def checksums(paths: list[Path], known: list[list[Span]] | None = None) -> list[str]:
    """Checksums of several files, read in parallel (zlib lets other threads run)."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(crc32, paths, known or [[] for _ in paths]))
