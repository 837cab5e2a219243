"""The weights of one step, written to disk while the next steps change them.

Every page of weights (and every tensor of the method's state) is a *source*. Worker threads write sources into
their places in the files, straight from their homes, in the order in which training will change them. Copies are
made on write only: before a page is changed (the engine tells, offload/engine.py), what is not on its way to disk
yet is copied aside. The copies together take at most `pool_bytes`, half of the weights; only when they are used up
does training wait, for the next page that the disk takes.

    waiting   the page is still to get its last update: zeroth-order steps apply it when they next visit the page
    ready     the home holds what is to be saved (on a GPU: after an event); nobody has it yet
    taken     a worker is writing it from its home
    copying   training copies it aside, and changes it then
    copied    the copy waits for a worker; the home is free to change
    writing   a worker is writing the copy
    done      written

A deferred update costs nothing here: the sweep of step t + 1 itself brings home the weights after step t, page
by page, and each page then stays as it is until the sweep of step t + 2 comes by. This is the paper's idea of two
halves (one is saved while the other is in use) at the grain of a page, and with a copy only where it is needed.
On the host side training runs one step ahead of the GPU, so a short wait here does not reach the GPU.

Pages on the GPU go through a page-locked buffer of PIECE_BYTES a worker, on a stream of its own.
"""

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from keyhole import ops
from keyhole.offload import arena
from keyhole.training.guard import NonFinite

PIECE_BYTES = 16 * 2**20
WORKERS = 4
INFINITY = {  # the integer of the same width, and the bits of infinity
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
WAITING, READY, TAKEN, COPYING, COPIED, WRITING, DONE = range(7)


@dataclass(frozen=True)
class Segment:
    """Elements [begin, end) of a source belong to this tensor, and go to this place of this file."""

    tensor: str
    begin: int
    end: int
    file: str
    offset: int


@dataclass
class Source:
    """Flat memory that goes to disk. unpacks: (elements, dtype) of what a packed page is unpacked to."""

    flat: torch.Tensor
    segments: list[Segment]
    unpacks: tuple[int, torch.dtype] | None = None
    state: int = READY
    event: Any = None  # after it the home holds what is to be saved
    copy: torch.Tensor | None = field(default=None, repr=False)

    @property
    def size_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


class Cancelled(Exception):
    """Training ended before the snapshot had all it needs."""


class Snapshot:
    """One snapshot on its way. pages: sources by the engine's page; others: the method's tensors.

    Becomes the engine's watch. `write` is called by a thread of the caller, and returns when all is written.
    """

    def __init__(self, pages: dict[int, Source], others: list[Source], pool_bytes: int, device: torch.device) -> None:
        self.pages, self.queue = pages, [*others, *pages.values()]
        self.order = [source for source in self.queue if source.state == READY]  # in which they came and will go
        self.pool_bytes, self.device = pool_bytes, device
        self.copied_bytes = self.peak_bytes = 0
        self.waited_s = 0.0  # how long training was held up
        self.error: BaseException | None = None
        self.hand: Hand | None = None  # training's own
        self.turn = threading.Condition()

    # -- training's side -----------------------------------------------------------------------------------------------

    def before_change(self, page: int) -> None:
        """Returns when the page's home may be changed: it is written, copied, or still waiting for its update."""
        source = self.pages.get(page)
        if source is not None:
            self.release(source)

    def release(self, source: Source) -> None:
        """The same for any source."""
        begin_s = time.perf_counter()
        with self.turn:
            self.turn.wait_for(lambda: source.state not in (READY, TAKEN) or self._may_copy(source))
            if source.state != READY:
                self.waited_s += time.perf_counter() - begin_s
                return
            self.copied_bytes += source.size_bytes
            self.peak_bytes = max(self.peak_bytes, self.copied_bytes)
            source.state = COPYING
        copy = self._copy(source)
        with self.turn:
            if source.state != DONE:  # it failed meanwhile
                source.state, source.copy, source.event = COPIED, copy, None
            self.turn.notify_all()
        self.waited_s += time.perf_counter() - begin_s

    def changed(self, page: int, stream: Any) -> None:
        """The page has had the update it was waiting for, once the work queued on the stream is done."""
        source = self.pages.get(page)
        if source is None or source.state != WAITING:
            return
        with self.turn:
            source.event = event_on(stream)
            source.state = READY
            self.order.append(source)
            self.turn.notify_all()

    def release_all(self) -> None:
        """Returns when everything may be changed."""
        for source in self.queue:
            self.release(source)

    @property
    def is_whole(self) -> bool:
        """Whether nothing waits for an update any more."""
        return all(source.state != WAITING for source in self.queue)

    def cancel(self) -> None:
        self.fail(Cancelled("training ended before the weights of this step were whole"))

    def _may_copy(self, source: Source) -> bool:
        return source.state == READY and self.copied_bytes + source.size_bytes <= self.pool_bytes

    def _copy(self, source: Source) -> torch.Tensor:
        if source.event is not None:
            source.event.synchronize()
        copy = arena.host_memory(source.size_bytes).view(source.flat.dtype)
        if self.hand is None:
            self.hand = Hand(self.device)
        size = PIECE_BYTES // copy.element_size()
        for target, piece in zip(copy.split(size), source.flat.split(size), strict=True):
            target.copy_(self.hand.to_host(piece))
        return copy

    # -- the disk's side -----------------------------------------------------------------------------------------------

    def write(self, directory: Path) -> None:
        """Writes all sources into files that exist already in their full size. Raises what went wrong."""
        names = {segment.file for source in self.queue for segment in source.segments}
        files = {name: os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC) for name in names}
        try:
            threads = [threading.Thread(target=self._work, args=(files,), daemon=True) for _ in range(WORKERS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for file in files.values():
                os.close(file)
        if self.error is not None:
            raise self.error

    def _work(self, files: dict[str, int]) -> None:
        hand = Hand(self.device)
        try:
            while (source := self._take()) is not None:
                if source.event is not None:
                    source.event.synchronize()
                hand.write(source, source.flat if source.copy is None else source.copy, files)
                with self.turn:
                    self._free(source)
                    source.state = DONE
                    self.turn.notify_all()
        except BaseException as error:  # of any kind: training must not wait for a worker that is gone
            self.fail(error)

    def _take(self) -> Source | None:
        """The next source to write; None when there is none left."""
        with self.turn:
            while True:
                free = next((s for s in self.order if s.state in (READY, COPIED)), None)
                if free is not None:
                    free.state = TAKEN if free.copy is None else WRITING
                    return free
                if self.error is not None or all(s.state in (TAKEN, WRITING, DONE) for s in self.queue):
                    return None
                self.turn.wait()

    def _free(self, source: Source) -> None:
        if source.copy is not None:
            self.copied_bytes -= source.size_bytes
            source.copy = None

    def fail(self, error: BaseException) -> None:
        with self.turn:
            self.error = self.error or error
            for source in self.queue:
                self._free(source)
                source.state = DONE
            self.turn.notify_all()


class Hand:
    """What a worker writes with: on a GPU a page-locked buffer and a stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def write(self, source: Source, flat: torch.Tensor, files: dict[str, int]) -> None:
        if source.unpacks is not None:
            numel, dtype = source.unpacks
            unpacked = torch.empty(numel, dtype=dtype)
            ops.fp8_decode(flat.cpu(), unpacked)
            flat = unpacked
        for segment in source.segments:
            offset = segment.offset
            for piece in flat[segment.begin : segment.end].split(PIECE_BYTES // flat.element_size()):
                host = self.to_host(piece)
                check_finite(host, segment.tensor)
                write_at(files[segment.file], memoryview(host.view(torch.uint8).numpy()), offset)
                offset += host.numel() * host.element_size()

    def to_host(self, piece: torch.Tensor) -> torch.Tensor:
        if piece.device.type != "cuda":
            return piece
        with torch.cuda.stream(self.stream):
            host = self.buffer[: piece.numel() * piece.element_size()].view(piece.dtype)
            host.copy_(piece, non_blocking=True)
        self.stream.synchronize()
        return host


def check_finite(piece: torch.Tensor, name: str) -> None:
    """NonFinite when a number is not; weights that are broken must not take the place of good ones.

    Without its sign a number is not finite if its bits, as an integer, reach those of infinity. (By numpy: torch would
    start a team of threads for each worker, in the way of the thread that launches kernels.)"""
    if piece.dtype in INFINITY and piece.numel():
        integer, infinity = INFINITY[piece.dtype]
        bits = piece.view(integer).numpy()
        if (bits & torch.iinfo(integer).max).max() >= infinity:
            raise NonFinite(f"{name} holds NaN or infinity")


def write_at(file: int, data: memoryview, offset: int) -> None:
    """All of the bytes, at this place of the file."""
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def event_on(stream: Any) -> Any:
    """An event behind everything queued on a stream; None without one."""
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event


def segments_of(tensors: Iterable[tuple[str, int, int]], start: int, stop: int, places: dict[str, Any],
                element_bytes: int) -> list[Segment]:  # fmt: skip
    """The parts of the flat array [start, stop) that belong to tensors (name, start, stop), and where they go."""
    found = []
    for name, first, last in tensors:
        begin, end = max(start, first), min(stop, last)
        if begin < end and name in places:
            place = places[name]
            offset = place.offset + (begin - first) * element_bytes
            found.append(Segment(name, begin - start, end - start, place.file, offset))
    return found
