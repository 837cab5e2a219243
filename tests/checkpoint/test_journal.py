"""The journal: what is appended comes back, what is torn or changed does not."""

import errno
import json
import os
import struct
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyhole.checkpoint import journal
from keyhole.checkpoint.journal import BadJournal, Header, Record, Writer, create, read
from keyhole.training.records import Journaling

HEADER = Header(
    base="ab" * 32, first=0, source="tiny", seed=7, directions=2, distribution="gaussian", rounding="stochastic",
    eps=1e-3, dtype="bfloat16", wire=None, frozen=[], end_token_ids=[3], loader={"rows": 5}, config={"seed": 7},
    versions={},
)  # fmt: skip


def record(step: int) -> Record:
    lr, g = (struct.unpack("<f", struct.pack("<f", value))[0] for value in (1e-6 * step, 0.3 * step))
    return Record(step, 7, step // 4, step % 4, 0.1, "cpu", (lr, g, -g))


def write(path: Path, count: int, header: Header = HEADER, sync_every: int = 1) -> None:
    writer = Writer(path, create(path, header), header.first, sync_every)
    for step in range(header.first + 1, header.first + count + 1):
        writer.append(record(step))
    writer.close()


@pytest.mark.parametrize("sync_every", [1, 3])
def test_records_come_back_to_the_bit(tmp_path: Path, sync_every: int) -> None:
    """Every number of every record, and the header; 60 bytes a step for two directions."""
    write(tmp_path / "journal", 5, sync_every=sync_every)
    found = read(tmp_path / "journal")
    assert found.header == HEADER and found.fault is None and found.last == 5
    assert found.records == [record(step) for step in range(1, 6)]
    assert (tmp_path / "journal").stat().st_size == len(journal.pack_header(HEADER)) + 5 * 60


def test_a_torn_tail_is_detected_at_every_length_and_cut(tmp_path: Path) -> None:
    """Whatever part of the last record reached the disk, the records before it are read, and appending goes on."""
    path = tmp_path / "journal"
    write(path, 3)
    content = path.read_bytes()
    for missing in range(1, 60):
        path.write_bytes(content[:-missing])
        found = read(path)
        assert found.last == 2 and found.torn and "step 3 is cut off" in found.fault
    writer = Writer(path, read(path), 2)
    writer.append(record(3))
    writer.close()
    assert path.read_bytes() == content


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_flipped_bit_is_read(tmp_path: Path, place: int, bit: int) -> None:
    path = tmp_path / "journal"
    write(path, 4)
    content = bytearray(path.read_bytes())
    place %= len(content)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    try:
        found = read(path)
    except BadJournal:
        assert place < len(content) - 4 * 60
    else:
        intact = (place - (len(content) - 4 * 60)) // 60
        assert found.records == [record(step) for step in range(1, intact + 1)] and found.fault
        assert not found.torn  # the last record too: it is whole, so it was changed


def test_records_of_another_journal_are_strangers(tmp_path: Path) -> None:
    """A record is checked against the header it was written under, and against the step before it."""
    write(tmp_path / "a", 2)
    write(tmp_path / "b", 3, replace(HEADER, base="cd" * 32))
    a, b = (tmp_path / name for name in "ab")
    a.write_bytes(a.read_bytes() + b.read_bytes()[-60:])
    assert read(a).last == 2 and "was changed" in read(a).fault
    write(a, 3)
    content = a.read_bytes()
    a.write_bytes(content[:-120] + content[-60:])  # step 2 is gone
    assert read(a).last == 1 and "step 2 holds step 3" in read(a).fault


def test_going_back_cuts(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 4)
    writer = Writer(path, read(path), 2)
    writer.append(record(3))
    assert writer.wait_for(3, 1.0) and not writer.wait_for(4, 0.01)
    writer.sync()
    assert writer.synced == 3
    writer.close()
    assert read(path).last == 3


def test_a_full_disk_leaves_no_half_record_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is kept, and comes before the next record when there is room again."""
    path = tmp_path / "journal"
    writer = Writer(path, create(path, HEADER), 0)
    writer.append(record(1))
    real = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[:10], offset))
        with pytest.raises(OSError) as error:
            writer.append(record(2))
        assert error.value.errno == errno.ENOSPC and read(path).last == 1 and read(path).fault is None
    writer.append(record(3))
    writer.close()
    assert read(path).records == [record(1), record(2), record(3)]


def packed(header: dict, length: int | None = None) -> bytes:
    """A header as a file has it, with a right checksum, whatever it says."""
    text = json.dumps(header).encode()
    front = journal.FRONT.pack(journal.MAGIC, journal.VERSION, len(text) if length is None else length) + text
    return front + journal.CRC.pack(zlib.crc32(front))


UNTRUE = {
    "first": [-1, 10**18, 1.5, "1", None, True],
    "seed": [-1, 2**64, "7"],
    "directions": [0, -5, 10**9, 2.0],
    "eps": ["x", float("nan"), None],
    "frozen": ["abc", [1], None],
    "end_token_ids": [3, ["a"], [-1]],
    "loader": [[], None],
    "config": ["x"],
    "dtype": [None, 3],
    "run": [7],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in UNTRUE for value in UNTRUE[name]])
def test_a_header_that_no_run_wrote_is_refused(tmp_path: Path, name: str, value: object) -> None:
    """Its checksum is right, what it says is not."""
    (tmp_path / "journal").write_bytes(packed(asdict(HEADER) | {name: value}))
    with pytest.raises(BadJournal, match="cannot be true"):
        read(tmp_path / "journal")


def test_a_header_longer_than_its_file_is_not_read(tmp_path: Path) -> None:
    """Nor one of gigabytes, in a file that claims to have them."""
    path = tmp_path / "journal"
    for length in (10_000, 2**32 - 1):
        path.write_bytes(packed(asdict(HEADER), length))
        os.truncate(path, 2**33)
        with pytest.raises(BadJournal, match="damaged"):
            read(path)
    (tmp_path / "deep").write_bytes(b"")
    text = b"[" * 10**5
    front = journal.FRONT.pack(journal.MAGIC, journal.VERSION, len(text)) + text
    (tmp_path / "deep").write_bytes(front + journal.CRC.pack(zlib.crc32(front)))
    with pytest.raises(BadJournal, match="cannot be true"):
        read(tmp_path / "deep")


@pytest.mark.parametrize(
    "numbers",
    [
        {"coef": (float("nan"), 0.0, 0.0)},
        {"coef": (1e-3, float("inf"), 0.0)},
        {"weight_decay": float("nan")},
        {"device": 9},
    ],
)
def test_numbers_that_no_step_has_end_a_journal(tmp_path: Path, numbers: dict) -> None:
    """A record whose checksum is right, with an update that is not finite or a device that does not exist."""
    path = tmp_path / "journal"
    write(path, 1)
    bad = record(2)
    values = {"coef": bad.coef, "weight_decay": bad.weight_decay, "device": 0} | numbers
    body = HEADER.record.pack(2, 7, 0, 2, values["weight_decay"], values["device"], *values["coef"])
    body += journal.CRC.pack(zlib.crc32(body, read(path).seed_crc))
    path.write_bytes(path.read_bytes() + body)
    assert read(path).last == 1 and "holds numbers that no step has" in read(path).fault


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"hello")
    with pytest.raises(BadJournal, match="not a journal"):
        read(path)
    os.mkfifo(tmp_path / "pipe")  # nobody waits for somebody to write into it
    with pytest.raises(BadJournal, match="not a regular file"):
        read(tmp_path / "pipe")
    for version in (1, 2, 9):
        path.write_bytes(journal.FRONT.pack(journal.MAGIC, version, 0) + b"....")
        with pytest.raises(BadJournal, match=f"version {version}"):
            read(path)


# -- on their way to the disk: what is counted as flushed is flushed -------------------------------------------------


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
        journaling.say_flushes()
    assert len(said) == 1 and "cannot be flushed to the disk" in said[0] and "the steps after 0" in said[0]
    disk.broken = False
    assert journaling.flush_up_to(1)
    journaling.say_flushes()
    assert said[1:] == ["the journal is flushed again, up to step 1"]
    disk.broken = True
    writer.append(record(2))
    journaling.close()
    assert "the journal is on the disk up to step 1 only" in said[2]
    with pytest.raises(OSError):
        os.fstat(writer.file)


def test_the_flushing_thread_counts_only_what_it_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert read(path).records == [record(1), record(2)]  # what the system had dropped is written again


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
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".journal.tmp").symlink_to(tmp_path / "victim")
    made = create(tmp_path / "journal", HEADER)
    (tmp_path / "link").symlink_to(tmp_path / "journal")
    with pytest.raises(OSError, match="symbolic link"):
        Writer(tmp_path / "link", made, 0)
    assert (tmp_path / "victim").read_text() == "precious"
