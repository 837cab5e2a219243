"""The journal: a zeroth-order run as a list of numbers, one record per step, appended to run/journal.

The weights after step t are a function of the base weights and of

    (seed, step, lr, c_1 .. c_q, weight_decay)     of the steps 1 .. t,

so 4 (1 + q) + 48 bytes per step make every step durable, and a run can be shared as base + journal. The file:

    header    "KEYHOLEJ", version u32, length u32, JSON, CRC-32 of all of that
    record    step, seed, epoch, row u64; weight_decay f64; device u32; lr, c_1 .. c_q f32; CRC-32

All numbers are little endian. (epoch, row) is the position in the data after the step. lr and c are exactly the numbers
of the update (methods/zo/estimators.py; mezo's c_i is g_i/q after clipping), and all zero if a loss was not finite.
The CRC of a record is seeded with the header's, so records of another journal are not accepted; steps are consecutive.
Reading stops at the first record that is incomplete, changed, out of order or not finite: usually the end that a crash
left incomplete, which is cut off before appending. After a power cut, last records can also have their full length
without their content, because a file can grow on the disk before its data are there. That cannot be told from later
damage: --resume cuts off both and does the steps again, `keyhole replay` refuses both (it cannot know that the run had
no more steps).

Durability: `append` passes a record to the operating system; from then on it survives the death of the process
(kill -9). A thread then flushes it to the disk, at once or after `sync_every` records; from then on it survives a power
cut. Training waits for neither; `sync` does. A record that a full disk took only in part is cut off again, kept in
memory, and written before the next one. When a flush fails, the system may drop data that it could not write, and
report success the next time: so records are kept until they have been flushed, and are written again after a failure.
"""

import errno
import json
import math
import os
import struct
import threading
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO

from keyhole.checkpoint.state import MOST_STEPS
from keyhole.disk.files import open_regular, replacing, reserve, try_place
from keyhole.disk.json_text import Json, decode
from keyhole.errors import UserError
from keyhole.limits import Limit
from keyhole.methods import METHODS

MAGIC, VERSION = b"KEYHOLEJ", 4
FRONT = struct.Struct("<8sII")
CRC = struct.Struct("<I")
DEVICES = ("cpu", "cuda")
HEADER_BYTES = 16 * 2**20  # upper limit; real headers have a few kilobytes
AHEAD_BYTES = 2**20  # of the disk, reserved at every flush: 19,000 records of one direction
LIGHT = "light: "  # in place of the content hash of a base: what identifies a checkpoint without weights of blocks


class BadJournal(Exception):
    """The file is not a journal, or its header is damaged; the message says which."""


@dataclass(frozen=True)
class Header:
    """The common facts of all records. `base` is the content hash of the weights that they start from, after `first`
    steps, `base_config` the numbers of its config (as in state.py); `run` is the id of the run (training/rundir.py)."""

    base: str
    first: Annotated[int, Limit(0, MOST_STEPS)]
    source: str
    seed: Annotated[int, Limit(0, 2**64 - 1)]
    directions: Annotated[int, Limit(1, 2**16)]
    distribution: str
    rounding: str
    eps: float
    dtype: str
    wire: str | None
    frozen: list[str]
    end_token_ids: list[Annotated[int, Limit(0)]]
    loader: Json
    config: Json
    versions: Json
    run: str | None = None
    base_config: Json | None = None

    @property
    def record(self) -> struct.Struct:
        return struct.Struct(f"<4QdI{1 + self.directions}f")


@dataclass(frozen=True)
class Record:
    """One step. `coef` is [lr, c_1 .. c_q] in float32; step counts from 1, its noise is that of step - 1."""

    step: int
    seed: int
    epoch: int
    row: int
    weight_decay: float
    device: str
    coef: tuple[float, ...]


@dataclass(frozen=True)
class Journal:
    """A journal as read: the good records, and what is wrong with the rest. `begin` is the end of the header in the
    file, and `seed_crc` the checksum of the header's bytes."""

    header: Header
    records: list[Record] = field(repr=False)
    begin: int
    seed_crc: int
    fault: str | None = None  # why reading stopped before the end of the file
    torn: bool = False  # only the last record is incomplete: a process died while it wrote

    @property
    def last(self) -> int:
        """Steps done after the last record."""
        return self.records[-1].step if self.records else self.header.first


def pack_header(header: Header) -> bytes:
    text = json.dumps(asdict(header), sort_keys=True).encode()
    front = FRONT.pack(MAGIC, VERSION, len(text)) + text
    return front + CRC.pack(zlib.crc32(front))


def pack_record(record: Record, header: Header, seed_crc: int) -> bytes:
    """seed_crc: the header's CRC."""
    numbers = (record.step, record.seed, record.epoch, record.row, record.weight_decay, DEVICES.index(record.device))
    body = header.record.pack(*numbers, *record.coef)
    return body + CRC.pack(zlib.crc32(body, seed_crc))


def read(path: Path) -> Journal:
    """The journal in a file, up to its first bad record."""
    try:
        file = os.fdopen(open_regular(path.resolve(), os.O_RDONLY), "rb")
    except OSError as error:
        raise BadJournal(f"{path} cannot be read: {error.strerror}") from None
    with file:
        header, seed_crc = _read_header(file, path)
        begin, end, size = file.tell(), os.fstat(file.fileno()).st_size, header.record.size + CRC.size
        records: list[Record] = []
        for at in range(begin, end, size):
            found = _read_record(file.read(size), header, seed_crc, header.first + len(records) + 1)
            if isinstance(found, str):
                return Journal(header, records, begin, seed_crc, found, torn=end - at < size)
            records.append(found)
        return Journal(header, records, begin, seed_crc)


def _read_header(file: BinaryIO, path: Path) -> tuple[Header, int]:
    front = file.read(FRONT.size)
    if len(front) < FRONT.size or not front.startswith(MAGIC):
        raise BadJournal(f"{path} is not a journal of keyhole")
    _, version, length = FRONT.unpack(front)
    if version != VERSION:
        raise BadJournal(f"{path} is a journal of version {version}; this keyhole reads version {VERSION}")
    text = file.read(length) if length <= HEADER_BYTES else b""
    crc, stored = zlib.crc32(front + text), file.read(CRC.size)
    if len(text) < length or len(stored) < CRC.size or CRC.unpack(stored)[0] != crc:
        raise BadJournal(f"the header of {path} is damaged (its checksum does not match)")
    try:
        return decode(json.loads(text), Header), crc
    except (ValueError, RecursionError) as error:
        raise BadJournal(f"the header of {path} cannot be true: {error}") from None


def _read_record(piece: bytes, header: Header, seed_crc: int, step: int) -> Record | str:
    size = header.record.size + CRC.size
    if len(piece) < size:
        return f"the record of step {step} is cut off after {len(piece)} of {size} bytes"
    if CRC.unpack(piece[-CRC.size :])[0] != zlib.crc32(piece[: -CRC.size], seed_crc):
        return f"the record of step {step} was changed (its checksum does not match)"
    found, its_seed, epoch, row, decay, device, *coef = header.record.unpack_from(piece)
    if (found, its_seed) != (step, header.seed):
        return f"the record of step {step} holds step {found} of seed {its_seed}"
    if device >= len(DEVICES) or not all(map(math.isfinite, (decay, *coef))):
        what = f"device {device}, weight decay {decay}, update {coef}"
        return f"the record of step {step} holds numbers that no step has: {what}"
    return Record(found, its_seed, epoch, row, decay, DEVICES[device], tuple(coef))


def create(path: Path, header: Header) -> Journal:
    """Creates an empty journal atomically: the file has a complete header, or does not exist."""
    content = pack_header(header)
    with replacing(path) as file:
        file.write(content)
    return Journal(header, [], len(content), CRC.unpack(content[-CRC.size :])[0])


class Writer:
    """Appends records to a journal that was read or created, after cutting off everything after record `last`. `synced`
    counts flushed records only, and `fault` is the error of the last flush, for a message to the user."""

    def __init__(self, path: Path, journal: Journal, last: int, sync_every: int = 1) -> None:
        assert journal.header.first <= last <= journal.last, (journal.header.first, last, journal.last)
        self.header, self.seed_crc, self.begin = journal.header, journal.seed_crc, journal.begin
        self.sync_every, self.record_bytes = sync_every, journal.header.record.size + CRC.size
        self.file = open_regular(path, os.O_WRONLY)
        os.ftruncate(self.file, self._end(last))
        reserve(self.file, self._end(last), AHEAD_BYTES)
        os.fsync(self.file)
        self.unsynced: list[bytes] = []  # the records after step `synced`, of which those up to `last` are in the file
        self.last = self.synced = self.tried = last
        self.fault: OSError | None = None
        self.closing = False
        self.changed = threading.Condition()
        self.flushing = threading.Lock()
        self.syncer = threading.Thread(target=self._sync_behind, name="keyhole-journal", daemon=True)
        self.syncer.start()

    @property
    def appended(self) -> int:
        """The last step whose record was given; on a full disk the file may lack it."""
        return self.synced + len(self.unsynced)

    def _end(self, step: int) -> int:
        """The offset behind the record of a step."""
        return self.begin + (step - self.header.first) * self.record_bytes

    def append(self, record: Record) -> None:
        """Writes a record; it then survives this process. OSError if the disk is full: the partial record is cut off,
        kept in memory, and written before the next one."""
        with self.changed:
            assert record.step == self.appended + 1, (record.step, self.last)
            self.unsynced.append(pack_record(record, self.header, self.seed_crc))
            self._write(self.last)

    def _write(self, after: int) -> None:
        """Writes the records after this step. OSError: the file ends with a whole record, but lacks some."""
        data, done = b"".join(self.unsynced[after - self.synced :]), 0
        try:
            done = os.pwrite(self.file, data, self._end(after))
            if done < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            self.last = after + done // self.record_bytes
            if done < len(data):
                with suppress(OSError):  # the next write begins there in any case
                    os.ftruncate(self.file, self._end(self.last))
            self.changed.notify_all()

    def _sync_behind(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closing or self.last >= self.tried + self.sync_every)
                if self.closing:
                    return
            with suppress(OSError):
                self.sync()

    def sync(self) -> None:
        """Returns when all records appended so far are on the disk. OSError if that failed."""
        with self.flushing:
            fault = None
            try:
                with self.changed:
                    step = self.last
                    if self.fault is not None:
                        self._write(self.synced)
                reserve(self.file, self._end(step), AHEAD_BYTES)
                os.fsync(self.file)
            except OSError as error:
                fault = error
            with self.changed:
                self.fault, self.tried = fault, step
                if fault is None:
                    del self.unsynced[: step - self.synced]
                    self.synced = step
                self.changed.notify_all()
        if fault is not None:
            raise fault

    def wait_for(self, step: int, timeout_s: float) -> bool:
        """Returns when the record of a step has been appended; False if it was never appended. OSError if it could not
        be written."""
        with self.changed:
            self.changed.wait_for(lambda: self.appended >= step or self.closing, timeout_s)
            if self.last < step <= self.appended:
                self._write(self.last)
            return self.last >= step

    def end(self) -> None:
        """No more records follow: wakes threads that wait for one."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def close(self) -> None:
        """Writes and flushes the remaining records, ends the thread, and closes the file. OSError if something was not
        written."""
        self.end()
        self.syncer.join()
        try:
            with self.changed:
                self._write(self.last)
            self.sync()
            os.ftruncate(self.file, self._end(self.last))  # gives the reserved space back
        finally:
            os.close(self.file)


# -- the paths of `keyhole replay`, checked before torch is imported ---------------------------------------------------


def check_journal(path: Path) -> Path:
    """The file of a journal, or the one in an output directory; UserError if there is none."""
    path = path / "run" / "journal" if (path / "run" / "journal").exists() else path
    if path.is_file():
        return path
    keep = ", ".join(row.name for row in METHODS.values() if row.journaled)
    found = "has no run/journal" if path.is_dir() else "is no regular file" if path.exists() else "is not there"
    raise UserError(
        f"JOURNAL: {path} {found}; give the output_dir of a run that keeps one ({keep}), or its run/journal"
    )


def check_out(out: Path) -> None:
    """Refuses a place for the model that is not free, or cannot be written to."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "exists and is not empty" if out.is_dir() else "is a file"
        raise UserError(f"OUT: {out} {what}; choose a new directory")
    try:
        try_place(out)
    except OSError as error:
        raise UserError(f"OUT: {out} cannot be written: {error.filename}: {error.strerror}") from error
