"""Pieces appended to a file, on a disk that is really full."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keyhole.disk.append import Appender


def test_a_full_disk_takes_whole_pieces_and_loses_none(small_disk: Callable[[int], Path]) -> None:
    """The file ends with a whole piece at any time; what waits is written in order when there is room again."""
    root = small_disk(1)
    (root / "filler").write_bytes(bytes(900_000))
    pieces = [bytes([i % 256]) * 1000 for i in range(300)]
    file, taken, failed = os.open(root / "file", os.O_WRONLY | os.O_CREAT), [], 0
    appender = Appender(file, 0, taken.append)
    for piece in pieces:
        try:
            appender.append(piece)
        except OSError:
            failed += 1
        assert (root / "file").stat().st_size == 1000 * len(taken)
    assert 0 < failed < 300 and len(appender.pending) == failed
    (root / "filler").unlink()
    appender.write_pending()
    os.close(file)
    assert (root / "file").read_bytes() == b"".join(pieces) and taken == pieces


def test_a_file_that_cannot_be_cut_is_mended_by_the_next_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a piece that stays behind the end is overwritten."""
    file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    appender, real = Appender(file, 0), os.pwrite

    def refuse(*args: object) -> None:
        raise OSError

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(os, "pwrite", lambda file, data, at: real(file, data[:3], at))
        patch.setattr(os, "ftruncate", refuse)
        appender.append(b"first ")
    appender.append(b"second")
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b"first second"
