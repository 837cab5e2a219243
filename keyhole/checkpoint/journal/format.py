"""The journal: a zeroth-order run as a list of numbers, one record per step, appended to run/journal.

The weights after step t are a function of the base weights and of

    (seed, step, lr, c_1 .. c_q, weight_decay)     of the steps 1 .. t,

so 4 (1 + q) + 48 bytes per step make every step durable, and a run can be shared as base + journal. The file:

    header    "KEYHOLEJ", version u32, length u32, JSON, CRC-32 of all of that
    record    step, seed, epoch, row u64; weight_decay f64; device u32; lr, c_1 .. c_q, memory f32; CRC-32

All numbers are little endian. (epoch, row) is the position in the data after the step. lr and c are exactly the numbers
of the update (methods/zo/estimators/; mezo's c_i is g_i/q after clipping), and all zero if a loss was not finite.
`memory` is the state of the estimator and of the rate search after the step; the header says how many numbers it has.
A file without memory has version 1, one with memory has version 2. The CRC of a record is seeded with the header's, so
records of another journal are not accepted; steps are consecutive. Reading stops at the first record that is
incomplete, changed, out of order or not finite: usually the end that a crash left incomplete, which is cut off before
appending. After a power cut, last records can also have their full length without their content, because a file can
grow on the disk before its data are there. That cannot be told from later damage: --resume cuts off both and does the
steps again, `keyhole replay` refuses both (it cannot know that the run had no more steps). writer.py appends records.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from keyhole.disk.files import open_regular, replacing

MAGIC, VERSIONS = b"KEYHOLEJ", (1, 2)
FRONT = struct.Struct("<8sII")
CRC = struct.Struct("<I")
DEVICES = ("cpu", "cuda")
HEADER_BYTES = 16 * 2**20  # upper limit; real headers have a few kilobytes
MOST_STEPS = 2**32 - 1  # a step is a 32-bit word of the noise's counter
MOST_DIRECTIONS = 2**16
MOST_MEMORY = 64
LIGHT = "light: "  # in place of the content hash of a base: what identifies a checkpoint without weights of blocks


class BadJournal(Exception):
    """The file is not a journal, or its header is damaged; the message says which."""


@dataclass(frozen=True)
class Header:
    """The common facts of all records. `base` is the content hash of the weights that they start from, after `first`
    steps; `run` is the id of the run (training/rundir.py), which journals before version 0.2 lack."""

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
    run: str | None = None
    memory: int = 0


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
    memory: tuple[float, ...] = ()


@dataclass(frozen=True)
class Journal:
    """A journal as read: the good records, and what is wrong with the rest. `begin` is the end of the header in the
    file, and `seed_crc` the checksum of the header's bytes as they are in the file."""

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

    def after(self, step: int) -> list[Record]:
        return [record for record in self.records if record.step > step]


def layout(directions: int, memory: int = 0) -> struct.Struct:
    """The struct of a record, without its CRC."""
    return struct.Struct(f"<4QdI{1 + directions + memory}f")


def pack_header(header: Header) -> bytes:
    told = asdict(header)
    if not header.memory:
        del told["memory"]
    text = json.dumps(told, sort_keys=True).encode()
    front = FRONT.pack(MAGIC, VERSIONS[1 if header.memory else 0], len(text)) + text
    return front + CRC.pack(zlib.crc32(front))


def pack_record(record: Record, seed_crc: int) -> bytes:
    """seed_crc: the header's CRC."""
    numbers = (record.step, record.seed, record.epoch, record.row, record.weight_decay)
    floats = (*record.coef, *record.memory)
    body = layout(len(floats) - 1).pack(*numbers, DEVICES.index(record.device), *floats)
    return body + CRC.pack(zlib.crc32(body, seed_crc))


def read(path: Path) -> Journal:
    """The journal in a file, up to its first bad record."""
    try:
        file = os.fdopen(open_regular(path.resolve(), os.O_RDONLY), "rb")
    except OSError as error:
        raise BadJournal(f"{path} cannot be read: {error.strerror}") from None
    with file:
        header, seed_crc, begin = _read_header(file, path)
        shape, size_bytes = layout(header.directions, header.memory), os.fstat(file.fileno()).st_size
        size = shape.size + CRC.size
        records: list[Record] = []
        for at in range(begin, size_bytes, size):
            expected = (records[-1].step if records else header.first) + 1
            record, fault = _read_record(file.read(size), shape, seed_crc, expected, header)
            if record is None:
                what = f"the record of step {expected} {fault}"
                return Journal(header, records, begin, seed_crc, what, torn=size_bytes - at < size)
            records.append(record)
        return Journal(header, records, begin, seed_crc)


def _read_header(file: BinaryIO, path: Path) -> tuple[Header, int, int]:
    """(header, its CRC, where the records begin)."""
    front = file.read(FRONT.size)
    if len(front) < FRONT.size or not front.startswith(MAGIC):
        raise BadJournal(f"{path} is not a journal of keyhole")
    _, version, length = FRONT.unpack(front)
    if version not in VERSIONS:
        raise BadJournal(
            f"{path} is a journal of version {version}; this keyhole reads {' and '.join(map(str, VERSIONS))}"
        )
    text = file.read(length) if length <= HEADER_BYTES else b""
    crc, stored = zlib.crc32(front + text), file.read(CRC.size)
    if len(text) < length or len(stored) < CRC.size or CRC.unpack(stored)[0] != crc:
        raise BadJournal(f"the header of {path} is damaged (its checksum does not match)")
    try:
        header = Header(**json.loads(text))
        _check(header)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadJournal(f"the header of {path} cannot be true: {error}") from None
    return header, crc, FRONT.size + length + CRC.size


def _check(header: Header) -> None:
    """ValueError for values that no run could have written, although the checksum is right."""
    ranges = {"first": (0, MOST_STEPS), "seed": (0, 2**64 - 1), "directions": (1, MOST_DIRECTIONS)}
    ranges |= {"memory": (0, MOST_MEMORY)}
    for name, (low, high) in ranges.items():
        value = getattr(header, name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}, and must be a whole number from {low} to {high}")
    kinds: dict[str, Any]
    kinds = {"base": str, "source": str, "distribution": str, "rounding": str, "dtype": str, "eps": (int, float)}
    kinds |= {"wire": (str, type(None)), "run": (str, type(None)), "frozen": list, "end_token_ids": list}
    kinds |= {"loader": dict, "config": dict, "versions": dict}
    for name, kind in kinds.items():
        if not isinstance(getattr(header, name), kind):
            raise ValueError(f"{name} is {str(getattr(header, name))[:80]!r}, of the wrong kind")
    if not all(isinstance(name, str) for name in header.frozen) or not math.isfinite(header.eps):
        raise ValueError("frozen must be a list of names, and eps finite")
    if not all(type(token) is int and token >= 0 for token in header.end_token_ids):
        raise ValueError("end_token_ids must be a list of whole numbers")


def _read_record(
    piece: bytes, shape: struct.Struct, seed_crc: int, step: int, header: Header
) -> tuple[Record | None, str]:
    """(the record of this step, "") or (None, what is wrong with it)."""
    if len(piece) < shape.size + CRC.size:
        return None, f"is cut off after {len(piece)} of {shape.size + CRC.size} bytes"
    if CRC.unpack(piece[-CRC.size :])[0] != zlib.crc32(piece[: -CRC.size], seed_crc):
        return None, "was changed (its checksum does not match)"
    found, its_seed, epoch, row, decay, device, *floats = shape.unpack_from(piece)
    if (found, its_seed) != (step, header.seed):
        return None, f"holds step {found} of seed {its_seed}"
    if device >= len(DEVICES) or not all(map(math.isfinite, (decay, *floats))):
        return None, f"holds numbers that no step has: device {device}, weight decay {decay}, update {floats}"
    coef, memory = tuple(floats[: 1 + header.directions]), tuple(floats[1 + header.directions :])
    return Record(found, its_seed, epoch, row, decay, DEVICES[device], coef, memory), ""


def create(path: Path, header: Header) -> Journal:
    """Creates an empty journal atomically: the file has a complete header, or does not exist."""
    content = pack_header(header)
    with replacing(path) as file:
        file.write(content)
    return Journal(header, [], len(content), CRC.unpack(content[-CRC.size :])[0])


def rename_old(path: Path) -> Path:
    """Renames a journal that cannot be continued: journal.1, journal.2, .."""
    names: Iterator[Path] = (path.with_name(f"{path.name}.{i}") for i in range(1, 10**6))
    target = next(name for name in names if not os.path.lexists(name))
    os.replace(path, target)
    return target
