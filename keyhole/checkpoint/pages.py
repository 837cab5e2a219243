"""Memory that is saved in a checkpoint, and how it is written into its places in the files.

A source is a page of weights (offload/engine.py) or a tensor of the method's state, as flat memory. A page contains
tensors, or parts of them, so it has segments: elements [begin, end) belong to a tensor and are stored at an offset of a
file. Memory is written in pieces: from a GPU through a page-locked buffer, from host memory directly. Each piece is
checked to be finite first, because broken weights must not replace good ones, and its CRC-32 is kept, so that the file
need not be read again (disk/crc.py).
"""

import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from keyhole.disk.crc import Span
from keyhole.disk.tensors import Place
from keyhole.errors import NonFinite

WAITING, READY, COPYING, TAKEN, DONE = range(5)  # see snapshot.py
PIECE_BYTES = 16 * 2**20
BUFFER_BYTES = 4 * 2**20  # page-locked, for pieces from a GPU; 4 MiB already reach the full rate
CHECKED_TOGETHER = 2**20  # elements; they and their integer view stay in a core's cache
INFINITY = {  # the integer of the same width, and the bits of infinity
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


@dataclass(frozen=True)
class Segment:
    """Elements [begin, end) of a source belong to this tensor, and are stored at this offset of this file."""

    tensor: str
    begin: int
    end: int
    file: str
    offset: int


@dataclass
class Source:
    """Flat memory that is written to the disk. unpack: for a packed page, returns its numbers from its bytes."""

    flat: torch.Tensor
    segments: list[Segment]
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None
    state: int = READY
    event: torch.cuda.Event | None = None  # after it the home has the weights to save
    copy: torch.Tensor | None = field(default=None, repr=False)

    @property
    def size_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


def whole(name: str, tensor: torch.Tensor, place: Place) -> Source:
    """A tensor that is a source by itself."""
    return Source(tensor.detach().reshape(-1), [Segment(name, 0, tensor.numel(), place.file, place.offset)])


def segments_of(
    tensors: Iterable[tuple[str, int, int]], start: int, stop: int, places: dict[str, Place], element_bytes: int
) -> list[Segment]:
    """The parts of the flat array [start, stop) that belong to tensors (name, start, stop), and their places."""
    found = []
    for name, first, last in tensors:
        begin, end = max(start, first), min(stop, last)
        if begin < end and name in places:
            offset = places[name].offset + (begin - first) * element_bytes
            found.append(Segment(name, begin - start, end - start, places[name].file, offset))
    return found


class PageWriter:
    """Writes sources; each thread has its own, because on a GPU it owns a page-locked buffer and a stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)

    def write(self, source: Source, files: dict[str, int], sums: dict[str, list[Span]]) -> None:
        """Writes a source in pieces, and adds their checksums to `sums`."""
        flat = source.flat if source.copy is None else source.copy
        most = BUFFER_BYTES if flat.is_cuda else PIECE_BYTES
        flat = flat if source.unpack is None else source.unpack(flat.cpu())
        size = most // flat.element_size()
        for segment in source.segments:
            offset = segment.offset
            for begin in range(segment.begin, segment.end, size):
                host = self.to_host(flat[begin : min(begin + size, segment.end)])
                check_finite(host, segment.tensor)
                data = host.view(torch.uint8).numpy().data
                write_at(files[segment.file], data, offset)
                sums[segment.file].append((offset, len(data), zlib.crc32(data)))
                offset += len(data)

    def to_host(self, piece: torch.Tensor) -> torch.Tensor:
        """The piece itself, or its copy in the buffer, which the next call overwrites."""
        if self.stream is None or not piece.is_cuda:
            return piece
        with torch.cuda.stream(self.stream):
            host = self.buffer[: piece.numel() * piece.element_size()].view(piece.dtype)
            host.copy_(piece, non_blocking=True)
        self.stream.synchronize()
        return host


def check_finite(piece: torch.Tensor, name: str) -> None:
    """NonFinite if the bits of a number without its sign, as an integer, are at least those of infinity. (With numpy:
    torch would start a thread team for each worker, which would disturb the thread that launches kernels.)"""
    if piece.dtype in INFINITY and piece.numel():
        integer, infinity = INFINITY[piece.dtype]
        bits, unsigned = piece.view(integer).numpy(), torch.iinfo(integer).max
        for begin in range(0, len(bits), CHECKED_TOGETHER):
            if (bits[begin : begin + CHECKED_TOGETHER] & unsigned).max() >= infinity:
                raise NonFinite(f"{name} holds NaN or infinity")


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Writes all bytes at this offset of the file."""
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done
