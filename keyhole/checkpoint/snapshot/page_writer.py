"""Writes flat memory into its places in the files of a checkpoint.

Memory is written in pieces: from a GPU through a page-locked buffer, from host memory directly. Each piece is checked
to be finite first, because broken weights must not replace good ones, and its CRC-32 is kept, so that the file need not
be read again (disk/crc.py).
"""

import os
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from keyhole.checkpoint.snapshot.source import Source
from keyhole.disk.crc import Span
from keyhole.errors import NonFinite

PIECE_BYTES = 16 * 2**20
BUFFER_BYTES = 4 * 2**20  # page-locked, for pieces from a GPU; 4 MiB already reach the full rate
Memory = Callable[[Source], AbstractContextManager[torch.Tensor]]
CHECKED_TOGETHER = 2**20  # elements; they and their integer view stay in a core's cache
INFINITY = {  # the integer of the same width, and the bits of infinity
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


class PageWriter:
    """Writes sources; each thread has its own, because on a GPU it owns a page-locked buffer and a stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)

    def write(self, source: Source, memory: Memory, files: dict[str, int], sums: dict[str, list[Span]]) -> None:
        """Writes a source in pieces, each read inside memory(source), and adds their checksums to `sums`."""
        if source.unpacks is not None:
            numel, dtype, decode = source.unpacks
            unpacked = torch.empty(numel, dtype=dtype)
            with memory(source) as flat:
                decode(flat.cpu(), unpacked)
            memory = lambda _: nullcontext(unpacked)  # noqa: E731
        for segment in source.segments:
            most = BUFFER_BYTES if source.flat.is_cuda else PIECE_BYTES
            offset, size = segment.offset, most // source.saved_dtype.itemsize
            for begin in range(segment.begin, segment.end, size):
                with memory(source) as flat:
                    host = self.to_host(flat[begin : min(begin + size, segment.end)])
                    check_finite(host, segment.tensor)
                    data = host.view(torch.uint8).numpy().data
                    write_at(files[segment.file], data, offset)
                    sums[segment.file].append((offset, len(data), zlib.crc32(data)))
                offset += len(data)

    def to_host(self, piece: torch.Tensor) -> torch.Tensor:
        """The piece itself, or its copy in the buffer, which the next call overwrites."""
        if piece.device.type != "cuda":
            return piece
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            host = self.buffer[: piece.numel() * piece.element_size()].view(piece.dtype)
            host.copy_(piece, non_blocking=True)
        self.stream.synchronize()
        return host


def check_finite(piece: torch.Tensor, name: str) -> None:
    """NonFinite if a number is not finite; broken weights must not replace good ones.

    A number is not finite if its bits without the sign, as an integer, are at least those of infinity. (With numpy:
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
