"""The checksum of a file that was written in pieces, from the checksums of the pieces.

CRC-32 is linear over bits. Let Z(n) be the effect of n zero bytes on a checksum, a 32 x 32 matrix of bits. Then

    crc(a + b) = Z(len b) crc(a)  xor  crc(b)

so workers can compute checksums of the pieces they write, in any order and while these are in a core's cache, and the
file need not be read again (a second per gigabyte). Z(2 n) = Z(n) Z(n), so Z of any length takes a few dozen products.
A matrix is the list of its 32 columns; column i is the image of bit i.
"""

import zlib
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

Span = tuple[int, int, int]  # offset in the file, bytes, checksum
Matrix = list[int]
POLYNOMIAL = 0xEDB88320  # CRC-32's, lowest bit first, as in zlib
READ_BYTES = 4 * 2**20


def _times(matrix: Matrix, bits: int) -> int:
    """Matrix times vector."""
    found = 0
    for column in matrix:
        if bits & 1:
            found ^= column
        bits >>= 1
    return found


@lru_cache(maxsize=64)
def _power(k: int) -> tuple[int, ...]:
    """Z(2^k bytes)."""
    if k > 0:
        half = list(_power(k - 1))
        return tuple(_times(half, column) for column in half)
    matrix = [POLYNOMIAL] + [1 << i for i in range(31)]  # one zero bit: a shift, and the polynomial if a bit drops out
    for _ in range(3):
        matrix = [_times(matrix, column) for column in matrix]
    return tuple(matrix)


@lru_cache(maxsize=256)
def _zeros(size_bytes: int) -> tuple[int, ...]:
    """Z(size_bytes)."""
    matrix = [1 << i for i in range(32)]
    for k in range(size_bytes.bit_length()):
        if size_bytes >> k & 1:
            matrix = [_times(list(_power(k)), column) for column in matrix]
    return tuple(matrix)


def joined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two consecutive pieces, from their checksums."""
    return _times(list(_zeros(second_bytes)), first) ^ second


def crc_of(path: Path, spans: list[Span]) -> int:
    """A file's checksum. Only parts that the spans do not cover are read."""
    crc, at, size_bytes = 0, 0, path.stat().st_size
    with path.open("rb") as file:
        for offset, length, known in [*sorted(spans), (size_bytes, 0, 0)]:
            assert offset >= at, "pieces overlap"
            crc = _read(file, at, offset, crc)
            crc, at = joined(crc, known, length), offset + length
    return crc


def _read(file: BinaryIO, begin: int, end: int, crc: int) -> int:
    file.seek(begin)
    while begin < end and (block := file.read(min(READ_BYTES, end - begin))):
        crc, begin = zlib.crc32(block, crc), begin + len(block)
    return crc
