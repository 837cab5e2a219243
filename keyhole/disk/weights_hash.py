"""Which weights are these? A hash of the tensors in a Hugging Face directory, however they are cut into files.

    hash = SHA-256 over the sorted lines  "name dtype shape crc"       crc: CRC-32 of the tensor's bytes

The lines do not name files, so the same weights in other shards have the same hash; a CRC suffices because the
question is "did you give me the right directory?" and not "is somebody lying?". Tensors are read in parallel
(zlib lets other threads run): a few GB/s, and right after a load mostly from the page cache.
"""

import hashlib
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from keyhole.disk.weight_files import is_pickled
from keyhole.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PIECE_BYTES = 8 * 2**20
READERS = min(16, os.cpu_count() or 1)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold the model."""
    if (directory / INDEX).exists():
        names = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    return [directory / SINGLE]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(name -> dtype, shape, data_offsets; where the data begin) of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def content_hash(directory: Path) -> str:
    """The hash of the weights in a directory, 64 hex digits."""
    if is_pickled(directory):
        return _hash(_pickled_lines(directory))
    try:
        parts = []
        for path in weight_files(directory):
            header, begin = read_header(path)
            parts += [(path, begin, name, about) for name, about in header.items()]
        with ThreadPoolExecutor(READERS) as pool:
            lines = list(pool.map(_line, parts))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"model: the weights in {directory} cannot be read: {error}") from error
    return _hash(lines)


def _hash(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _pickled_lines(directory: Path) -> list[str]:
    """The lines of weights in .bin files: the same as those of the same tensors in safetensors."""
    from keyhole.disk.tensors import DTYPES, pieces
    from keyhole.disk.weight_files import open_shard, stored_tensors

    shards: dict[str, list[str]] = {}
    for name, stored in stored_tensors(directory).items():
        shards.setdefault(stored.file, []).append(name)
    lines = []
    for file, names in shards.items():
        shard = open_shard(directory / file)
        for name in names:
            tensor, crc = shard.get_tensor(name), 0
            for piece in pieces(tensor.contiguous()):
                crc = zlib.crc32(piece, crc)
            lines.append(f"{name} {DTYPES[tensor.dtype]} {list(tensor.shape)} {crc:08x}")
    return lines


def _line(part: tuple[Path, int, str, dict[str, Any]]) -> str:
    path, begin, name, about = part
    first, last = about["data_offsets"]
    crc, left = 0, last - first
    with path.open("rb") as file:
        file.seek(begin + first)
        while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
            crc, left = zlib.crc32(piece, crc), left - len(piece)
    if left:
        raise ValueError(f"{path.name} ends before the data of {name}")
    return f"{name} {about['dtype']} {about['shape']} {crc:08x}"
