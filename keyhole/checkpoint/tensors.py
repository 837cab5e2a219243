"""Safetensors one tensor at a time, so that optimizer state larger than free memory can be written and read.

The library's writer wants all tensors of a file on the host at once, and Adam's state is twice the model. The
format is simple enough to write directly:

    8 bytes   length of the header, little endian
    header    JSON, padded with spaces to a multiple of 8:  {name: {"dtype", "shape", "data_offsets"}}
    data      the tensors, one after the other; wider elements first, so that every tensor is aligned

Peak host memory: PIECE_BYTES for tensors on a GPU. Reading goes through the library, tensor by tensor
(`MethodState`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

PIECE_BYTES = 64 * 2**20
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a safetensors file; tensors may be on any device."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for piece in _pieces(tensors[name].detach()):
                file.write(piece)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.reshape(-1)
    for piece in flat.split(PIECE_BYTES // flat.element_size()):
        yield memoryview(piece.cpu().view(torch.uint8).numpy())


class MethodState(Mapping[str, Any]):
    """A method's saved state: scalars, and tensors that are read when they are asked for."""

    def __init__(self, scalars: dict[str, Any], file: Path | None) -> None:
        from safetensors import safe_open

        self.scalars = scalars
        self.opened = None if file is None else safe_open(file, framework="pt")
        self.names = [] if self.opened is None else list(self.opened.keys())

    def __getitem__(self, name: str) -> Any:
        if name in self.scalars:
            return self.scalars[name]
        if name not in self.names:
            raise KeyError(name)
        return self.opened.get_tensor(name).clone()  # a tensor of its own, not a window into the file

    def __iter__(self) -> Iterator[str]:
        yield from self.scalars
        yield from self.names

    def __len__(self) -> int:
        return len(self.scalars) + len(self.names)
