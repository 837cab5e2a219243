"""A hash that identifies the weights in a Hugging Face directory, regardless of how they are cut into files.

    hash = SHA-256 over the sorted lines  "name dtype shape crc"       crc: CRC-32 of the tensor's bytes

The lines do not name files, so the same weights in other shards have the same hash; a CRC is enough because the
hash detects a wrong directory, not a deliberate forgery. Tensors are read in parallel (zlib releases the GIL): a few
GB/s, and right after a load mostly from the page cache.

For a GGUF file a line has the type in the file (Q4_1), and the CRC of the bytes in the file. Weights in .bin files have
the hash of the same tensors in safetensors. This file does not import torch, unless a hash of tensors is asked for.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.disk.gguf import GGUFShard, gguf_files
from keyhole.disk.weight_files import KINDS, is_pickled, open_shard, read_header, stored_tensors
from keyhole.errors import UserError

if TYPE_CHECKING:
    import torch

INDEX, SINGLE = KINDS["safetensors"]
OWN_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
PIECE_BYTES = 8 * 2**20
READERS = min(16, os.cpu_count() or 1)


def _safetensors_files(directory: Path) -> list[Path]:
    """The safetensors files of the model."""
    if (directory / INDEX).exists():
        names = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    return [directory / SINGLE]


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


class Stopped(Exception):
    """The computation of the hash was cancelled."""


def content_hash(directory: Path, stop: Callable[[], bool] = lambda: False) -> str:
    """The hash of the weights in a directory, 64 hex digits. stop: called now and then; True raises Stopped."""
    if is_pickled(directory):
        return tensors_hash(_pickled(directory))
    try:
        parts = _gguf_parts(directory)
        for path in _safetensors_files(directory) if not parts else []:
            header, begin = read_header(path)
            parts += [(path, begin, name, about) for name, about in header.items()]
        with ThreadPoolExecutor(READERS) as pool:
            lines = list(pool.map(lambda part: _line(part, stop), parts))
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"model: the weights in {directory} cannot be read: {error}") from error
    return _hash_of(lines)


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


def _gguf_parts(directory: Path) -> list[tuple[Path, int, str, dict[str, Any]]]:
    """The tensors of GGUF files, if the weights are only in such files; none otherwise."""
    if (directory / INDEX).exists() or (directory / SINGLE).exists():
        return []
    parts = []
    for path in (directory / name for name in gguf_files(directory)):
        for name, entry in GGUFShard(path).entries.items():
            about = {"dtype": entry.form, "shape": list(entry.shape), "data_offsets": (entry.begin, entry.end)}
            parts.append((path, 0, name, about))
    return parts


def _pickled(directory: Path) -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors in .bin files."""
    shards: dict[str, list[str]] = {}
    for name, stored in stored_tensors(directory).items():
        shards.setdefault(stored.file, []).append(name)
    for file, names in shards.items():
        shard = open_shard(directory / file)
        yield from ((name, shard.get_tensor(name)) for name in names)


def _line(part: tuple[Path, int, str, dict[str, Any]], stop: Callable[[], bool]) -> str:
    path, begin, name, about = part
    first, last = about["data_offsets"]
    crc, left = 0, last - first
    with path.open("rb") as file:
        file.seek(begin + first)
        while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
            crc, left = zlib.crc32(piece, crc), left - len(piece)
            if stop():
                raise Stopped
    if left:
        raise ValueError(f"{path.name} ends before the data of {name}")
    return f"{name} {about['dtype']} {about['shape']} {crc:08x}"
