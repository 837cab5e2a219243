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
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from keyhole.checkpoint.pages import BUFFER_BYTES, COPYING, DONE, READY, TAKEN, WAITING, PageWriter, Source
from keyhole.disk.crc import Span
from keyhole.machine.host import cpu_count
from keyhole.offload import arena

WORKERS = 4
PAGE_WRITERS = WORKERS + 1  # one more for the training thread; on a GPU each has a buffer of BUFFER_BYTES
COPY_THREADS = 8
SMALL_BYTES = 2**20  # smaller copies are not divided
FLUSH_EVERY_S = 0.1


class Cancelled(Exception):
    """The snapshot cannot be finished: training ended before its weights were whole."""


class CopyThreads:
    """Threads that copy host memory; they are started by the constructor, on the cores that the caller may use.

    A page must be copied before its next change is queued, and training waits meanwhile. 400 MB every 45 ms (a 6.7B
    model, 16 x 2048 tokens) need 9 GB/s; one core reaches 3 to 5, including the allocation of fresh memory. torch's own
    threads would stay on the core to which training may be pinned; numpy's copy releases the GIL."""

    def __init__(self, count: int | None = None) -> None:
        self.count = min(COPY_THREADS, cpu_count()) if count is None else count
        self.pool = ThreadPoolExecutor(self.count, thread_name_prefix="keyhole-copy")
        together = threading.Barrier(self.count)
        list(self.pool.map(lambda _: together.wait(), range(self.count)))  # a pool starts its threads lazily

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies source to target: flat host tensors of one dtype and length."""
        into, out_of = (flat.view(torch.uint8).numpy() for flat in (target, source))
        parts = self.count if len(into) > SMALL_BYTES else 1
        cuts = [len(into) * i // parts for i in range(parts + 1)]
        spans = [slice(begin, end) for begin, end in zip(cuts, cuts[1:], strict=False)]
        list(self.pool.map(lambda at: np.copyto(into[at], out_of[at]), spans))


class Snapshot:
    """One snapshot that is being written. pages: sources by the engine's page; others: the method's tensors.

    While training goes on, it is installed as the engine's watch. The caller runs `write`, which returns when
    everything is written.
    """

    def __init__(
        self,
        pages: dict[int, Source],
        others: list[Source],
        pool_bytes: int,
        device: torch.device,
        copy_threads: CopyThreads,
    ) -> None:
        self.pages, self.queue = pages, [*others, *pages.values()]
        self.order = [source for source in self.queue if source.state == READY]  # in the order of training's changes
        self.pool_bytes, self.device, self.copy_threads = pool_bytes, device, copy_threads
        self.spare: list[torch.Tensor] = []  # memory of written copies, reused for the next ones
        self.copied_bytes = self.peak_bytes = 0
        self.waited_s = 0.0  # how long training waited
        self.error: BaseException | None = None
        self.own_writer: PageWriter | None = None  # of the training thread
        self.sums: dict[str, list[Span]] = {}  # file -> checksums of its pieces
        self.turn = threading.Condition()

    # -- called by training --------------------------------------------------------------------------------------------

    def before_change(self, page: int) -> None:
        """Returns when the page's home may change: it is written, copied, or still waiting for its update."""
        source = self.pages.get(page)
        if source is not None:
            self.release(source)

    def waits_for(self, page: int) -> bool:
        """Whether the page still lacks its last update."""
        source = self.pages.get(page)
        return source is not None and source.state == WAITING

    def release(self, source: Source) -> None:
        """Returns when a source may change: copies it if it is not written yet."""
        begin_s = time.perf_counter()

        def may_change() -> bool:
            return source.state in (WAITING, DONE) or source.copy is not None

        def may_copy() -> bool:
            return source.state == READY and self.copied_bytes + source.size_bytes <= self.pool_bytes

        with self.turn:
            self.turn.wait_for(lambda: may_change() or may_copy())
            if copies := not may_change():
                source.state = COPYING
                self.copied_bytes += source.size_bytes
                self.peak_bytes = max(self.peak_bytes, self.copied_bytes)
        if copies:
            self._copy_aside(source)
        self.waited_s += time.perf_counter() - begin_s

    def _copy_aside(self, source: Source) -> None:
        """Copies a source, for which the pool has room."""
        try:
            if source.event is not None:
                source.event.synchronize()
            copy = self._spare(source.size_bytes)
            copy = (arena.host_memory(source.size_bytes) if copy is None else copy).view(source.flat.dtype)
            if source.flat.is_cuda:
                self._fetch(source.flat, copy)
            else:
                self.copy_threads.copy(copy, source.flat)
        except BaseException as error:  # of any kind: workers must not wait for a failed copy
            self.fail(error)
            if isinstance(error, OSError):  # no memory for the copy: training continues
                return
            raise
        with self.turn:
            if source.state == DONE:  # a worker has failed meanwhile
                self.copied_bytes -= source.size_bytes
            else:
                source.copy, source.event, source.state = copy, None, READY
            self.turn.notify_all()

    def changed(self, page: int, stream: torch.cuda.Stream | None) -> None:
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

    def _spare(self, size_bytes: int) -> torch.Tensor | None:
        """Spare memory of this size, if any. Otherwise frees spare memory of other sizes, since all share the pool."""
        with self.turn:
            fits = next((i for i, memory in enumerate(self.spare) if memory.numel() == size_bytes), None)
            if fits is not None:
                return self.spare.pop(fits)
            while self.spare and self.copied_bytes + sum(m.numel() for m in self.spare) > self.pool_bytes:
                self.spare.pop()
            return None

    def _fetch(self, flat: torch.Tensor, copy: torch.Tensor) -> None:
        """Copies from the device, through the page writer's buffer."""
        self.own_writer = self.own_writer or PageWriter(self.device)
        size = BUFFER_BYTES // copy.element_size()
        for target, piece in zip(copy.split(size), flat.split(size), strict=True):
            self.copy_threads.copy(target, self.own_writer.to_host(piece))

    # -- called by writers ---------------------------------------------------------------------------------------------

    def write(self, directory: Path) -> None:
        """Writes all sources into files that exist already in their full size. Raises the first error."""
        names = {segment.file for source in self.queue for segment in source.segments}
        files = {name: os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC) for name in names}
        self.sums = {name: [] for name in names}
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
            with self.turn:  # training may be about to copy one of them
                self.spare.clear()
        if self.error is not None:
            raise self.error

    def _work(self, files: dict[str, int]) -> None:
        try:
            writer = PageWriter(self.device)
            while (source := self._take()) is not None:
                if source.event is not None:
                    source.event.synchronize()
                writer.write(source, files, self.sums)
                with self.turn:
                    self._free(source)
                    source.state = DONE
                    self.turn.notify_all()
        except BaseException as error:  # of any kind: training must not wait for a dead worker
            self.fail(error)

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
            self.copied_bytes -= source.size_bytes
            self.spare.append(source.copy.view(torch.uint8))
            source.copy = None

    def fail(self, error: BaseException) -> None:
        with self.turn:
            self.error = self.error or error
            for source in self.queue:
                self._free(source)
                source.state = DONE
            self.turn.notify_all()


def event_on(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """An event after all work queued on a stream; None without a stream."""
    if stream is None:
        return None
    event = torch.cuda.Event(blocking=True)  # waiting does not spin
    event.record(stream)
    return event
