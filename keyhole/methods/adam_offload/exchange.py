"""Gradients leave the GPU and new weights return: pages whose homes the host rewrites, and the gate for the engine.

Each page has a staging buffer in host memory with the page's length and dtype: the gradient arrives there, a job on the
host overwrites it with the new weights, and these return to the device.

    streamed page    its home is the staging buffer. (Between the last use of a page in a step and its first use in the
                     next, its home is not read; the weights are computed from the optimizer's master copy.) The engine
                     uploads it as usual, once the gate reports that it is ready.
    resident page    page-locked memory of the page's size; the worker sends the weights to the device itself. With
                     `masters` (the weights in fp32, page-locked) it sends those, and the device rounds them: twice the
                     bytes on a link that is idle, and a third less work for a CPU that is busy.

So a waiting gradient needs no memory beyond the 16-bit weights that host memory holds anyway, and 2 bytes per parameter
for resident pages. Order on a GPU:

    down (Downlink)         waits for: the kernels so far;           then gradient -> staging, and an event
    worker                  waits for: that event, on the host;      then the job
    up (its own stream)                                              then staging -> device, and an event
    helper                  waits for: the first event and the end of its work on the device, both on the host
    compute                 `wait` on the host for the job, then on the device for that event

No further synchronization is needed: a page's weights are overwritten after its event, which is recorded after the last
kernel that read them; its staging buffer is written again only after the next use of the page, which waited for the
upload. On a CPU device the same jobs run in the same worker, with plain copies.

For a sharded page (offload/shards.py) all of this holds for this rank's part. A resident part waits on the device for
its next gather, which the engine's own event orders behind the upload.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from keyhole.offload import arena
from keyhole.offload.downlink import Downlink
from keyhole.offload.engine import Engine
from keyhole.offload.slots import lend
from keyhole.offload.workers import DeviceJob, Job, Workers

Span = tuple[int, int]  # [begin, end) of a page
LANDING = 16 * 2**20  # elements of a master copy that are on the device at a time


class Exchange:
    """Sends gradients of pages to the host and brings their new weights back; it is the engine's gate. pages: those
    that will be rewritten. masters: by resident page, the source of its weights (None: its staging buffer). slices: for
    pages that every rank holds whole, the range that this rank updates; `complete` gathers them before their next use,
    and is called by all ranks in the same order. most_bytes: of gradients that wait on the device for the link."""

    def __init__(
        self,
        engine: Engine,
        pages: list[int],
        pool: Workers,
        masters: dict[int, torch.Tensor] | None = None,
        slices: dict[int, Span] | None = None,
        complete: Callable[[int], None] = lambda page: None,
        most_bytes: int | None = None,
    ) -> None:
        self.engine, self.pool, self.cuda = engine, pool, engine.cuda
        self.slices, self.complete = slices or {}, complete
        self.incomplete: set[int] = set()  # pages in `slices` that were rewritten and not gathered yet
        self.down = Downlink(engine, most_bytes)
        self.staging = _staging(engine, {page: self.kept(page) for page in pages})
        self.source = self.staging if masters is None else self.staging | masters
        self.leaving: set[int] = set()  # pages whose gradients are being sent and that have no job yet
        self.rewritten: set[int] = set()  # pages whose change must still be reported to a watch
        self.is_drained = True  # since the last gradient: whoever writes a home now is not overwritten
        self.wait_s = 0.0  # how long the launching thread has waited for jobs
        if self.cuda:
            self.up = torch.cuda.Stream(engine.device)
            self.uploaded = {page: torch.cuda.Event() for page in pages}
            self.landing = lend(torch.empty(LANDING if masters else 0, device=engine.device), [self.up])
        engine.gate = self

    def kept(self, page: int) -> torch.Tensor:
        """The part of a page that this process rewrites."""
        kept = self.engine.kept(page)
        return kept[slice(*self.slices[page])] if page in self.slices else kept

    def will_change(self, page: int) -> None:
        """Called before the page's home is rewritten; for a sharded page, on all ranks."""
        self.engine.before_change(page)
        if page in self.slices:
            self.incomplete.add(page)

    # -- gradients to the host -------------------------------------------------------------------------------------

    def put(self, page: int, begin: int, grad: torch.Tensor) -> None:
        """Sends a gradient to its place in the page's staging buffer. From now on the page is not ready."""
        if page not in self.leaving:
            self.will_change(page)
        self.leaving.add(page)
        self.is_drained = False
        self.rewritten.add(page)
        buffer = self.staging[page][begin : begin + grad.numel()]
        grad = grad.to(buffer.dtype).reshape(-1)
        self.engine.bytes_down += _bytes(grad)
        self.down.send(grad, buffer)

    def sent(self) -> Any:
        """An event: every gradient sent so far has arrived, and all kernels launched so far are done (kernels after the
        last `put` may still read the weights). None on a CPU."""
        return self.down.sent(and_kernels=True)

    def take_back(self) -> list[int]:
        """After an error: waits for running copies, and returns the pages whose gradients were sent without a job.
        Their staging buffers hold gradients, which the caller must overwrite with weights."""
        self.down.synchronize()
        pages = sorted(self.leaving)
        self.leaving.clear()
        return pages

    # -- jobs, and weights to the device ---------------------------------------------------------------------------

    def submit(
        self,
        page: int,
        job: Job,
        after: Any,
        back: list[Span],
        on_device: DeviceJob | None = None,
    ) -> None:
        """Queues a job for the worker, which then sends these spans of the page back. on_device: the same for the
        workers' helper, including the copy back. Pages that the next pass needs first have the lowest index, and are
        processed first."""

        def work() -> None:
            job()
            self.send_back(page, back)

        self.pool.submit(work, page=page, after=after, urgency=page, on_device=on_device)
        self.leaving.discard(page)
        if page not in self.engine.on_host:
            self.engine.bytes_up += sum(_bytes(self.source[page][begin:end]) for begin, end in back)

    def send_back(self, page: int, spans: list[Span]) -> None:
        """Uploads spans of a resident page; does nothing for a streamed page."""
        if page in self.engine.on_host:
            return
        home, source = self.kept(page).data, self.source[page]  # .data: otherwise autograd, which is differentiating
        # a neighbour in the same memory, would count this as a change of that tensor
        if not self.cuda:
            for begin, end in spans:
                home[begin:end].copy_(source[begin:end])
            return
        with torch.cuda.device(self.engine.device), torch.cuda.stream(self.up):
            for begin, end in spans:
                self._upload(source[begin:end], home[begin:end])
            self.uploaded[page].record(self.up)
            if page in self.engine.streamed:  # a resident part of a sharded page, which is gathered from here
                self.engine.home_written[page].record(self.up)

    def _upload(self, source: torch.Tensor, home: torch.Tensor) -> None:
        if source.dtype == home.dtype:
            home.copy_(source, non_blocking=True)
            return
        for part, target in zip(source.split(LANDING), home.split(LANDING), strict=True):
            target.copy_(self.landing[: part.numel()].copy_(part, non_blocking=True))

    # -- the engine's gate -----------------------------------------------------------------------------------------

    def ready(self, page: int) -> bool:
        """Whether the page's home holds its weights. Never waits."""
        return page not in self.leaving and self.pool.ready(page)

    def wait(self, page: int) -> None:
        """Blocks until it does; kernels launched afterwards see the weights."""
        assert page not in self.leaving, f"page {page} is asked for while its gradient leaves"
        if not self.pool.ready(page):
            begin_s = time.perf_counter()
            self.pool.wait(page)
            self.wait_s += time.perf_counter() - begin_s
        if self.cuda and page in self.uploaded and page not in self.engine.on_host:
            self.engine.compute.wait_event(self.uploaded[page])
        if page in self.incomplete:
            self.incomplete.discard(page)
            self.complete(page)
        if page in self.rewritten:
            self.rewritten.discard(page)
            self.engine.changed(page, self.engine.compute if self.cuda and page not in self.engine.on_host else None)

    def drain(self) -> None:
        """Blocks until every job is done and all weights sent back have arrived."""
        self.pool.drain()
        if self.cuda:
            self.up.synchronize()
        for page in sorted(self.incomplete):
            self.complete(page)
        self.incomplete.clear()
        self._report()
        self.is_drained = True

    def _report(self) -> None:
        while self.rewritten:
            self.engine.changed(self.rewritten.pop(), None)

    def finish(self) -> None:
        """Ends the worker after the updates that are under way, and stops being the gate. If an update failed, it stays
        the gate, so that whoever reads the weights gets the error. (Ranks flush first: they gather together.)"""
        if not self.pool.finish():
            return
        if self.cuda:
            self.up.synchronize()
        self._report()
        if self.engine.gate is self:  # not a later method's
            self.engine.gate = None

    def close(self) -> None:
        """Ends the worker; jobs that have not started are dropped."""
        self.pool.close()


def _bytes(flat: torch.Tensor) -> int:
    return flat.numel() * flat.element_size()


def _staging(engine: Engine, kept: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The homes of streamed pages, and one page-locked allocation for all others."""
    own = [page for page in kept if page not in engine.on_host]
    sizes = [-(-_bytes(kept[page]) // 256) * 256 for page in own]
    flat = arena.host_memory(sum(sizes)).fill_(0)
    if engine.cuda:
        arena.pin(flat, engine.device)
    staging = {page: kept[page] for page in kept if page in engine.on_host}
    for page, piece in zip(own, flat.split(sizes), strict=True):
        staging[page] = piece[: _bytes(kept[page])].view(kept[page].dtype)
    return staging
