"""Checksums of files from those of their pieces."""

import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from keyhole.disk.crc import crc_of, joined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_in_a_row(first: bytes, second: bytes) -> None:
    """zlib's checksum of both, also where one is empty."""
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_long_piece() -> None:
    """Lengths with many bits."""
    first, second = b"keyhole" * 999, bytes(range(256)) * 40_001
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8), st.integers(0, 7), st.randoms())
def test_a_file_of_pieces_and_gaps(content: bytes, cuts: list[int], known: int, order: object) -> None:
    """Some pieces are known, in any order; the rest is read."""
    edges = sorted({0, len(content), *(cut for cut in cuts if cut <= len(content))})
    pieces = list(zip(edges, edges[1:], strict=False))
    order.shuffle(pieces)
    spans = [(begin, end - begin, zlib.crc32(content[begin:end])) for begin, end in pieces[:known]]
    with TemporaryDirectory() as directory:
        path = Path(directory) / "f"
        path.write_bytes(content)
        assert crc_of(path, spans) == zlib.crc32(content)
