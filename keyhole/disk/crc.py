"""Checksums of files, also of one that was written in pieces, from the checksums of the pieces.

CRC-32 is the remainder of a polynomial over bits, so n bytes behind it multiply it by x^(8 n):

    crc(a + b) = x^(8 len b) crc(a)  xor  crc(b)        modulo CRC-32's polynomial

so workers can compute checksums of the pieces they write, in any order and while these are in a core's cache, and the
file need not be read again (a second per gigabyte). As in zlib, the lowest power is the highest bit.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

Span = tuple[int, int, int]  # offset in the file, bytes, checksum
POLYNOMIAL, ONE = 0xEDB88320, 1 << 31
READ_BYTES = 4 * 2**20
READERS = 4


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo CRC-32's."""
    found = 0
    while a:
        if a & ONE:
            found ^= b
        a, b = a << 1 & 0xFFFFFFFF, b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return found


@lru_cache(maxsize=256)
def _shift(size_bytes: int) -> int:
    """x^(8 size_bytes)."""
    found, power = ONE, ONE >> 8
    while size_bytes:
        found = _times(found, power) if size_bytes & 1 else found
        power, size_bytes = _times(power, power), size_bytes >> 1
    return found


def joined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two consecutive pieces, from their checksums."""
    return _times(_shift(second_bytes), first) ^ second


def crc_of(path: Path, spans: list[Span]) -> int:
    """A file's checksum. Only parts that the spans do not cover are read."""
    crc, at = 0, 0
    with path.open("rb") as file:
        for offset, length, known in [*sorted(spans), (path.stat().st_size, 0, 0)]:
            assert offset >= at, "pieces overlap"
            file.seek(at)
            while at < offset and (block := file.read(min(READ_BYTES, offset - at))):
                crc, at = zlib.crc32(block, crc), at + len(block)
            crc, at = joined(crc, known, length), offset + length
    return crc


def checksums(paths: list[Path], known: list[list[Span]] | None = None) -> list[str]:
    """Checksums of several files, eight hex digits each, read in parallel (zlib releases the GIL); known pieces are not
    read again."""
    with ThreadPoolExecutor(READERS) as pool:
        return [f"{crc:08x}" for crc in pool.map(crc_of, paths, known or [[] for _ in paths])]
