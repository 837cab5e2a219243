"""The weights of one step, written to disk while later steps change them (copy on write).

Every page of weights, and every tensor of the method's state, is a *source*. Worker threads write sources into their
places in the files, directly from host memory or the GPU (the page's home). If training is about to change a page that
is not written yet (the engine announces it, offload/protocols.py), the page is copied first, and written from the copy.
All copies together take at most `pool_bytes`, half of the weights or a little less. Workers write copies first, which
gives memory back, and then the page that training will change last: so training meets a page that is being written,
and waits for it, only when the pool is full as well. The states of a source:

    waiting   the page lacks its last update: zeroth-order steps apply it at their next visit of the page
    ready     the home, or a copy, has the weights to save (on a GPU: after an event); no worker has taken it
    copying   training copies it, and will then change the home; it is ready again afterwards
    taken     a worker is writing it
    done      written

A deferred update needs no extra pass: step t + 1 writes the weights after step t to their homes, page by page, and each
page then does not change until step t + 2 or later (methods/zo/write_back.py). This is the paper's idea of two halves
(one is saved while the other is in use), applied per page, with a copy only where needed. The host queues work one step
ahead of the GPU, so a short wait here does not stall the GPU.

A page contains tensors, or parts of them, so it has segments: elements [begin, end) belong to a tensor and are stored
at an offset of a file. Memory is written in pieces, from a GPU through a copy of each, from host memory directly.
Each piece is checked to be finite first, because broken weights must not replace good ones.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from keyhole.disk.tensors import Place
from keyhole.errors import NonFinite
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.offload import arena

WORKERS = 4
FLUSH_EVERY_S = 0.1
PIECE_BYTES = 16 * 2**20
CHECKED_TOGETHER = 2**20  # elements; they and their integer view stay in a core's cache
INFINITY = {  # the integer of the same width, and the bits of infinity
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
WAITING, READY, COPYING, TAKEN, DONE = range(5)


class Cancelled(Exception):
    """The snapshot cannot be finished: training ended before its weights were whole."""


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
    event: accelerator.Event | None = None  # after it the home has the weights to save
    copy: torch.Tensor | None = field(default=None, repr=False)

    def pieces(self) -> Iterator[tuple[Segment, int, torch.Tensor]]:
        """(segment, offset in its file, elements) of everything to write, from the copy if there is one."""
        flat = self.flat if self.copy is None else self.copy
        flat = flat if self.unpack is None else self.unpack(flat.cpu())
        for segment in self.segments:
            parts = flat[segment.begin : segment.end].split(PIECE_BYTES // flat.element_size())
            for i, part in enumerate(parts if segment.end > segment.begin else ()):
                yield segment, segment.offset + i * len(parts[0]) * flat.element_size(), part


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


class Snapshot:
    """One snapshot that is being written. pages: sources by the engine's page; others: the method's tensors.

    While training goes on, it is installed as the engine's watch. The caller runs `write`, which returns when
    everything is written.
    """

    def __init__(self, pages: dict[int, Source], others: list[Source], pool_bytes: int, device: torch.device) -> None:
        self.pages, self.queue = pages, [*others, *pages.values()]
        self.order = [source for source in self.queue if source.state == READY]  # in the order of training's changes
        self.pool_bytes, self.device = pool_bytes, device
        self.copied_bytes = self.peak_bytes = 0
        self.waited_s = 0.0  # how long training waited
        self.error: BaseException | None = None
        self.turn = threading.Condition()

    # -- called by training --------------------------------------------------------------------------------------------

    def before_change(self, page: int) -> None:
        """Returns when the page's home may change: it is written, copied, or still waiting for its update."""
        if page in self.pages:
            self.release(self.pages[page])

    def waits_for(self, page: int) -> bool:
        """Whether the page still lacks its last update."""
        return page in self.pages and self.pages[page].state == WAITING

    def release(self, source: Source) -> None:
        """Returns when a source may change: copies it if it is not written yet."""
        begin_s = time.perf_counter()

        def may_change() -> bool:
            return source.state in (WAITING, DONE) or source.copy is not None

        with self.turn:
            full_bytes = self.pool_bytes - source.flat.nbytes
            self.turn.wait_for(lambda: may_change() or (source.state == READY and self.copied_bytes <= full_bytes))
            if copies := not may_change():
                source.state = COPYING
                self.copied_bytes += source.flat.nbytes
                self.peak_bytes = max(self.peak_bytes, self.copied_bytes)
        if copies:
            self._copy_aside(source)
        self.waited_s += time.perf_counter() - begin_s

    def _copy_aside(self, source: Source) -> None:
        try:
            if source.event is not None:
                source.event.synchronize()
            copy = arena.host_memory(source.flat.nbytes).view(source.flat.dtype)
            with self._stream():
                copy.copy_(source.flat)
        except BaseException as error:  # of any kind: workers must not wait for a failed copy
            self.fail(error)
            if isinstance(error, OSError):  # no memory for the copy: training continues
                return
            raise
        with self.turn:
            if source.state == DONE:  # a worker has failed meanwhile
                self.copied_bytes -= source.flat.nbytes
            else:
                source.copy, source.event, source.state = copy, None, READY
            self.turn.notify_all()

    def changed(self, page: int, stream: accelerator.Stream | None) -> None:
        """The page has received the update it was waiting for, once the work queued on the stream is done."""
        with self.turn:
            if self.waits_for(page):
                source = self.pages[page]
                source.event, source.state = event_on(stream), READY
                self.order.append(source)
                self.turn.notify_all()

    def release_all(self) -> None:
        """Returns when all sources may change."""
        for source in self.queue:
            self.release(source)

    @property
    def is_whole(self) -> bool:
        """Whether no source waits for an update."""
        return all(source.state != WAITING for source in self.queue)

    # -- called by writers ---------------------------------------------------------------------------------------------

    def write(self, directory: Path) -> None:
        """Writes all sources into files that exist already in their full size. Raises the first error."""
        names = {segment.file for source in self.queue for segment in source.segments}
        files = {name: os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC) for name in names}
        threads = [threading.Thread(target=self._work, args=(files,), daemon=True) for _ in range(WORKERS)]
        try:
            for thread in threads:
                thread.start()
            while alive := [thread for thread in threads if thread.is_alive()]:
                for file in files.values():  # now and then: the kernel alone would start writing much later
                    os.fdatasync(file)
                alive[0].join(FLUSH_EVERY_S)
        except OSError as error:
            self.fail(error)
        finally:
            for thread in threads:
                thread.join()
            for file in files.values():
                os.close(file)
        if self.error is not None:
            raise self.error

    def _work(self, files: dict[str, int]) -> None:
        try:
            stream = self._stream()
            while (source := self._take()) is not None:
                if source.event is not None:
                    source.event.synchronize()
                for segment, offset, piece in source.pieces():
                    with stream:
                        host = piece.cpu()
                    check_finite(host, segment.tensor)
                    write_at(files[segment.file], host.view(torch.uint8).numpy().data, offset)
                with self.turn:
                    self._free(source)
                    source.state = DONE
                    self.turn.notify_all()
        except BaseException as error:  # of any kind: training must not wait for a dead worker
            self.fail(error)

    def _stream(self) -> AbstractContextManager[object]:
        """A context of copies from the GPU that are not behind the work that training has queued; elsewhere empty."""
        return accelerator.stream(accelerator.Stream(self.device)) if self.device.type == ACCELERATOR else nullcontext()

    def _take(self) -> Source | None:
        """The next source to write; None when there is none left."""
        with self.turn:
            while True:
                ready = [source for source in self.order if source.state == READY]
                if ready:
                    taken = next((source for source in ready if source.copy is not None), ready[-1])
                    taken.state = TAKEN
                    return taken
                if self.error is not None or all(source.state in (TAKEN, DONE) for source in self.queue):
                    return None
                self.turn.wait()

    def _free(self, source: Source) -> None:
        if source.copy is not None:
            self.copied_bytes -= source.flat.nbytes
            source.copy = None

    def fail(self, error: BaseException) -> None:
        with self.turn:
            self.error = self.error or error
            for source in self.queue:
                self._free(source)
                source.state = DONE
            self.turn.notify_all()


def event_on(stream: accelerator.Stream | None) -> accelerator.Event | None:
    """An event after all work queued on a stream; None without a stream."""
    if stream is None:
        return None
    event = accelerator.Event(blocking=True)  # waiting does not spin
    event.record(stream)
    return event


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
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done
