"""A hash that identifies the weights in a Hugging Face directory, regardless of how they are cut into files.

    hash = SHA-256 over the sorted lines  "name dtype shape crc"       crc: CRC-32 of the tensor's bytes

The lines do not name files, so the same weights in other shards have the same hash; a CRC is enough because the
hash detects a wrong directory, not a deliberate forgery. Tensors are read in parallel (zlib releases the GIL): a few
GB/s, and right after a load mostly from the page cache.

A .bin or GGUF file has one line, with the CRC of its bytes. This file does not import torch, unless a hash of tensors
is asked for.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.disk.weight_files import KINDS, read_header, weight_files
from keyhole.errors import UserError

if TYPE_CHECKING:
    import torch

INDEX, SINGLE = KINDS["safetensors"]
OWN_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
PIECE_BYTES = 8 * 2**20
READERS = min(16, os.cpu_count() or 1)
Part = tuple[Path, int, int, str]
"""Bytes [begin, end) of a file, and what is said of their tensor: its name, dtype and shape."""


def stored_weights(directory: Path) -> set[str]:
    """Names of the files in a directory that a model saved there consists of: model.safetensors,
    model-NNNNN-of-NNNNN.safetensors, and what the index lists. All other files belong to the user."""
    names = {path.name for path in directory.iterdir() if OWN_NAME.fullmatch(path.name)}
    try:
        listed = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        names |= {name for name in listed if Path(name).name == name and name.endswith(".safetensors")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # no valid index
    return {name for name in names if (directory / name).is_file()}


def content_hash(directory: Path) -> str:
    """The hash of the weights in a directory, 64 hex digits."""
    listed, parts = weight_files(directory), list[Part]()
    try:
        for path in sorted(directory / name for name in set(listed if isinstance(listed, list) else listed.values())):
            if path.suffix != ".safetensors":
                parts.append((path, 0, path.stat().st_size, "file"))
                continue
            header, begin = read_header(path)
            for name, about in header.items():
                first, last = about["data_offsets"]
                parts.append((path, begin + first, begin + last, f"{name} {about['dtype']} {about['shape']}"))
        with ThreadPoolExecutor(READERS) as pool:
            return _hash_of(pool.map(_line, parts))
    except OSError as error:
        raise UserError(f"model: the weights in {directory} cannot be read: {error}") from error


def tensors_hash(tensors: "Iterable[tuple[str, torch.Tensor]]") -> str:
    """The content_hash of a file with these tensors, which may be on any device."""
    from keyhole.disk.tensors import DTYPES, pieces  # here, because it imports torch

    lines = []
    for name, tensor in tensors:
        crc = 0
        for piece in pieces(tensor.detach()):
            crc = zlib.crc32(piece, crc)
        lines.append(f"{name} {DTYPES[tensor.dtype]} {list(tensor.shape)} {crc:08x}")
    return _hash_of(lines)


def _hash_of(lines: Iterable[str]) -> str:
    """The hash of lines in any order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _line(part: Part) -> str:
    path, begin, end, said = part
    crc, left = 0, end - begin
    with path.open("rb") as file:
        file.seek(begin)
        while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
            crc, left = zlib.crc32(piece, crc), left - len(piece)
    return f"{said} {crc:08x}"
