"""Reads and writes safetensors one tensor at a time, so that state may be larger than free memory.

The library's writer needs all tensors of a file on the host at once, and Adam's state is twice the model. The format is
simple enough to write directly:

    8 bytes   length of the header, little endian
    header    JSON, padded with spaces to a multiple of 8:  {name: {"dtype", "shape", "data_offsets"}}
    data      the tensors, one after the other; wider elements first, so that every tensor is aligned

`lay_out` cuts a model into files of at most SHARD_BYTES as Hugging Face does, and fixes the place of every tensor
before its data are known; `create` makes the files in their final size; then tensors, or parts of them, are written in
any order, from several threads or processes. Peak host memory: PIECE_BYTES for tensors on a GPU when writing; one
tensor when reading (`MethodState`).
"""

import copy
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from keyhole.disk.json_text import Json
from keyhole.disk.weight_files import KINDS, has_weights, open_shard, stored_tensors, tensors_in

PIECE_BYTES = 64 * 2**20
SHARD_BYTES = 2 * 10**9
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def first_dtype(directory: Path) -> torch.dtype | None:
    """That of the first weight in the files, which Transformers takes too where the config names none."""
    found = stored_tensors(directory).values() if has_weights(directory) else ()
    name = next((each.dtype for each in found if each.is_number and not each.form), None)
    return next((dtype for dtype, known in DTYPES.items() if known == name), None)


@dataclass(frozen=True)
class Spec:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    file: str
    offset: int


@dataclass(frozen=True)
class Files:
    """Safetensors files before they are filled: their headers and sizes, and the place of every tensor."""

    headers: dict[str, bytes] = field(default_factory=dict)
    size_bytes: dict[str, int] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    index: bytes | None = None  # for several files: the content of model.safetensors.index.json


def lay_out(specs: Sequence[Spec], name: str = "model", limit_bytes: int | None = None) -> Files:
    """Cuts tensors, in order, into files of at most limit_bytes (a larger tensor gets its own file)."""
    groups: list[list[Spec]] = [[]]
    for spec in specs:
        size = sum(s.size_bytes for s in groups[-1])
        if limit_bytes is not None and groups[-1] and size + spec.size_bytes > limit_bytes:
            groups.append([])
        groups[-1].append(spec)
    found, count = Files(), len(groups)
    for i, group in enumerate(groups, 1):
        file = f"{name}-{i:05}-of-{count:05}.safetensors" if count > 1 else f"{name}.safetensors"
        table: Json = {"__metadata__": {"format": "pt"}}
        end, begins = 0, {}
        for spec in sorted(group, key=lambda spec: -spec.dtype.itemsize):
            begins[spec.name], end = end, end + spec.size_bytes
            offsets = [begins[spec.name], end]
            table[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = found.headers[file] = len(text).to_bytes(8, "little") + text
        found.size_bytes[file] = len(header) + end
        found.places.update({name: Place(file, len(header) + begin) for name, begin in begins.items()})
    if count == 1:
        return found
    total = {"total_size": sum(s.size_bytes for s in specs)}
    total["total_parameters"] = sum(math.prod(s.shape) for s in specs)
    weight_map = {spec.name: found.places[spec.name].file for spec in specs}
    index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True).encode() + b"\n"
    return Files(found.headers, found.size_bytes, found.places, index)


def create(files: Files, directory: Path) -> None:
    """Empty files of their final size, and their index."""
    for name, header in files.headers.items():
        (directory / name).write_bytes(header)
        os.truncate(directory / name, files.size_bytes[name])
    if files.index is not None:
        (directory / KINDS["safetensors"][0]).write_bytes(files.index)


def fill(directory: Path, place: Place, tensor: torch.Tensor, begin: int = 0, flush: bool = False) -> None:
    """Writes a tensor, which may be on any device, to its place in a file; begin: it is a part that begins with this
    element."""
    with (directory / place.file).open("r+b") as file:
        file.seek(place.offset + begin * tensor.element_size())
        for piece in pieces(tensor.detach()):
            file.write(piece)
        if flush:
            file.flush()
            os.fsync(file.fileno())


def one_file(tensors: "Mapping[str, torch.Tensor | Ranges]", file: str) -> Files:
    specs = [Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())]
    return lay_out(specs, Path(file).stem)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    files = one_file(tensors, path.name)
    create(files, path.parent)
    for name, tensor in tensors.items():
        fill(path.parent, files.places[name], tensor)


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in order, one piece at a time."""
    flat = tensor.reshape(-1)
    for piece in flat.split(PIECE_BYTES // flat.element_size()):
        yield memoryview(piece.cpu().view(torch.uint8).numpy())


@dataclass(frozen=True)
class Ranges:
    """A tensor that is sharded over several processes: (index of the first element, elements) of each local part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    own: list[tuple[int, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class MethodState(Mapping[str, Any]):
    """A method's saved state: values in memory, and tensors of a file that are read on access."""

    def __init__(self, held: Mapping[str, Any], file: Path | None = None) -> None:
        self.held, self.file = dict(held), file
        self.table = {} if file is None else tensors_in(file)

    def __getitem__(self, name: str) -> Any:
        return self.held[name] if name in self.held else self.range_of(name).view(self.table[name].shape)

    def range_of(self, name: str, begin: int = 0, numel: int | None = None) -> torch.Tensor:
        """A range of elements of a tensor, flat; copied from a file: what is mapped counts as memory until it is
        closed."""
        if name in self.held:
            found: torch.Tensor = self.held[name].reshape(-1)
            return found[begin:][:numel]
        numel = math.prod(self.table[name].shape) if numel is None else numel
        assert self.file is not None  # without a file the table is empty
        return open_shard(self.file).get_tensor(name).view(-1)[begin : begin + numel].clone()

    def without(self, *names: str) -> "MethodState":
        """The same state without some of the values in memory; no tensor is read."""
        found = copy.copy(self)
        found.held = {key: value for key, value in self.held.items() if key not in names}
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self.held
        yield from self.table

    def __len__(self) -> int:
        return len(self.held) + len(self.table)
