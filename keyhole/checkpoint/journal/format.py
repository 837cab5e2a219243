"""The journal: a zeroth-order run as a list of numbers, one record a step, appended to run/journal.

The weights after step t are a function of the base weights and of

    (seed, step, lr, g_1/q .. g_q/q, weight_decay)     of the steps 1 .. t,

so 4 (1 + q) + 48 bytes a step make every step durable, and a run can be shared as base + journal. The file:

    header    "KEYHOLEJ", version u32, length u32, JSON, CRC-32 of all of that
    record    step, seed, epoch, row u64; weight_decay f64; device u32; lr, g_1/q .. f32; CRC-32

All little endian. (epoch, row) is the position in the data after the step. lr and g are the very numbers the
update used: g after clipping, and all zero where a loss was not finite. A record's CRC starts from the
header's, so a record of another journal is no record of this one; steps are consecutive. Reading stops at the
first record that is short, changed or out of order: the tail a crash tore off, which is cut before appending.
How records are appended is writer.py.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from keyhole.disk.files import flush

MAGIC, VERSION = b"KEYHOLEJ", 1
FRONT = struct.Struct("<8sII")
CRC = struct.Struct("<I")
DEVICES = ("cpu", "cuda")


class BadJournal(Exception):
    """A file that is no journal, or whose header is damaged; the message says which."""


@dataclass(frozen=True)
class Header:
    """What all records share. `base` is the content hash of the weights that they start from, after `first` steps."""

    base: str
    first: int
    source: str
    seed: int
    directions: int
    distribution: str
    rounding: str
    eps: float
    dtype: str
    wire: str | None
    frozen: list[str]
    end_token_ids: list[int]
    loader: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One step. `coef` is [lr, g_1/q .. g_q/q] in float32; step counts from 1, its noise is that of step - 1."""

    step: int
    seed: int
    epoch: int
    row: int
    weight_decay: float
    device: str
    coef: tuple[float, ...]


@dataclass(frozen=True)
class Journal:
    """A journal as read: the good records, and what is wrong with the rest."""

    header: Header
    records: list[Record] = field(repr=False)
    fault: str | None = None  # why reading stopped before the end of the file
    torn: bool = False  # no more than the last record is missing: what a crash leaves

    @property
    def last(self) -> int:
        """Steps done after the last record."""
        return self.records[-1].step if self.records else self.header.first

    def after(self, step: int) -> list[Record]:
        return [record for record in self.records if record.step > step]


def layout(directions: int) -> struct.Struct:
    """A record without its CRC."""
    return struct.Struct(f"<4QdI{1 + directions}f")


def pack_header(header: Header) -> bytes:
    text = json.dumps(asdict(header), sort_keys=True).encode()
    front = FRONT.pack(MAGIC, VERSION, len(text)) + text
    return front + CRC.pack(zlib.crc32(front))


def pack_record(record: Record, seed_crc: int) -> bytes:
    """seed_crc: the header's CRC."""
    numbers = (record.step, record.seed, record.epoch, record.row, record.weight_decay)
    body = layout(len(record.coef) - 1).pack(*numbers, DEVICES.index(record.device), *record.coef)
    return body + CRC.pack(zlib.crc32(body, seed_crc))


def read(path: Path) -> Journal:
    """The journal in a file, up to its first bad record."""
    content = path.read_bytes()
    header, seed_crc, begin = _read_header(content, path)
    shape = layout(header.directions)
    size = shape.size + CRC.size
    records: list[Record] = []
    while begin < len(content):
        piece = content[begin : begin + size]
        fault = _fault(piece, size, seed_crc)
        record = None if fault else _record(shape, piece)
        expected = (records[-1].step if records else header.first) + 1
        if record is not None and (record.step, record.seed) != (expected, header.seed):
            fault = f"holds step {record.step} of seed {record.seed}"
        if fault:
            what = f"the record of step {expected} {fault}"
            return Journal(header, records, what, torn=len(content) - begin <= size)
        records.append(record)
        begin += size
    return Journal(header, records)


def _read_header(content: bytes, path: Path) -> tuple[Header, int, int]:
    """(header, its CRC, where the records begin)."""
    if len(content) < FRONT.size or not content.startswith(MAGIC):
        raise BadJournal(f"{path} is not a journal of keyhole")
    _, version, length = FRONT.unpack_from(content)
    if version != VERSION:
        raise BadJournal(f"{path} is a journal of version {version}; this keyhole reads {VERSION}")
    end = FRONT.size + length
    if len(content) < end + CRC.size or CRC.unpack_from(content, end)[0] != zlib.crc32(content[:end]):
        raise BadJournal(f"the header of {path} is damaged (its checksum does not match)")
    header = Header(**json.loads(content[FRONT.size : end]))
    return header, zlib.crc32(content[:end]), end + CRC.size


def _fault(piece: bytes, size: int, seed_crc: int) -> str:
    if len(piece) < size:
        return f"is cut off after {len(piece)} of {size} bytes"
    if CRC.unpack(piece[-CRC.size :])[0] != zlib.crc32(piece[: -CRC.size], seed_crc):
        return "was changed (its checksum does not match)"
    return ""


def _record(shape: struct.Struct, piece: bytes) -> Record:
    step, seed, epoch, row, decay, device, *coef = shape.unpack_from(piece)
    return Record(step, seed, epoch, row, decay, DEVICES[device], tuple(coef))


def create(path: Path, header: Header) -> Journal:
    """An empty journal: complete, or not there at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(pack_header(header))
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)
    return Journal(header, [])


def rename_old(path: Path) -> Path:
    """Gives a journal that cannot be continued a name of its own: journal.1, journal.2, .."""
    names: Iterator[Path] = (path.with_name(f"{path.name}.{i}") for i in range(1, 10**6))
    target = next(name for name in names if not name.exists())
    os.replace(path, target)
    return target
