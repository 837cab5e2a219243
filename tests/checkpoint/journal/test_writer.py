"""Records on their way to the disk: what is counted as flushed is flushed."""

import errno
import os
from pathlib import Path

import pytest

from keyhole.checkpoint.journal.format import create, read
from keyhole.checkpoint.journal.writer import Writer
from keyhole.training.journaling import Journaling
from tests.checkpoint.journal.test_format import HEADER, record


class Disk:
    """os.fsync and os.pwrite as the system does them, or failing as a bad disk does: what was not flushed is
    dropped."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.broken, self.failed, self.safe = path, False, 0, 0
        self.fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.flush)

    def flush(self, file: int) -> None:
        if self.broken:
            self.failed += 1
            os.ftruncate(file, self.safe)  # the kernel marks the pages clean and forgets them
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.fsync(file)
        self.safe = os.fstat(file).st_size


def test_a_failed_flush_is_not_counted_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are written again before the next flush, because the system may have dropped them."""
    path = tmp_path / "journal"
    header = create(path, HEADER)
    disk = Disk(path, monkeypatch)
    writer = Writer(path, header, 0, sync_every=100)
    writer.append(record(1))
    writer.sync()
    disk.broken = True
    for step in (2, 3):
        writer.append(record(step))
        with pytest.raises(OSError):
            writer.sync()
        assert writer.synced == 1 and isinstance(writer.fault, OSError)
    disk.broken = False
    writer.sync()
    assert writer.synced == 3 and writer.fault is None and read(path).records == [record(1), record(2), record(3)]
    writer.close()


def test_a_failed_flush_is_said_once_and_so_is_the_next_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the step up to which a power cut would lose nothing."""
    path, said = tmp_path / "journal", []
    header = create(path, HEADER)
    disk = Disk(path, monkeypatch)
    writer = Writer(path, header, 0, sync_every=100)
    journaling = Journaling(writer, None, said.append)
    disk.broken = True
    writer.append(record(1))
    for _ in range(2):
        with pytest.raises(OSError):
            journaling.flush_up_to(1)
        journaling._say_flushes()
    assert len(said) == 1 and "cannot be flushed to the disk" in said[0] and "the steps after 0" in said[0]
    disk.broken = False
    assert journaling.flush_up_to(1)
    journaling._say_flushes()
    assert said[1:] == ["the journal is flushed again, up to step 1"]
    disk.broken = True
    writer.append(record(2))
    journaling.close()
    assert "the journal is on the disk up to step 1 only" in said[2]
    with pytest.raises(OSError):
        os.fstat(writer.file)


def test_the_flushing_thread_counts_only_what_it_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries again with the next record, and does not spin meanwhile."""
    path = tmp_path / "journal"
    header = create(path, HEADER)
    disk = Disk(path, monkeypatch)
    writer = Writer(path, header, 0)
    disk.broken = True
    writer.append(record(1))
    with writer.changed:
        assert writer.changed.wait_for(lambda: writer.tried == 1, 20) and writer.synced == 0
    assert disk.failed == 1
    disk.broken = False
    writer.append(record(2))
    with writer.changed:
        assert writer.changed.wait_for(lambda: writer.synced == 2, 20) and writer.fault is None
    writer.close()
    assert read(path).last == 2


def test_a_record_that_cannot_be_written_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save asks for the journal up to its step: on a full disk it hears at once that it cannot be had."""
    path = tmp_path / "journal"
    writer = Writer(path, create(path, HEADER), 0)

    def full(*about: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError):
            writer.append(record(1))
        with pytest.raises(OSError):
            writer.wait_for(1, timeout_s=3600.0)
    assert writer.wait_for(1, timeout_s=3600.0)
    writer.close()
    assert read(path).last == 1


def test_a_journal_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Neither its temporary nor the journal itself."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".journal.tmp").symlink_to(tmp_path / "victim")
    made = create(tmp_path / "journal", HEADER)
    (tmp_path / "link").symlink_to(tmp_path / "journal")
    with pytest.raises(OSError, match="symbolic link"):
        Writer(tmp_path / "link", made, 0)
    assert (tmp_path / "victim").read_text() == "precious"
