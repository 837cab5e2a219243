"""Gradients leave the GPU and new weights return: pages whose homes the host rewrites, and the gate for the engine.

Each page has a staging buffer in host memory with the page's length and dtype: the gradient arrives there, a job on the
host overwrites it with the new weights, and these return to the device.

    streamed page    its home is the staging buffer. (Between the last use of a page in a step and its first use in the
                     next, its home is not read; the weights are computed from the optimizer's master copy.) The engine
                     uploads it as usual, once the gate reports that it is ready.
    resident page    page-locked memory of the page's size; the worker sends the weights to the device itself: from
                     `masters` (in fp32, page-locked), and the device rounds them: twice the bytes on a link that is
                     idle, and a third less work for a CPU that is busy.

Order on a GPU:

    down (Downlink)         waits for: the kernels so far;           then gradient -> staging, and an event
    worker                  waits for: that event, on the host;      then the job
    up (its own stream)                                              then masters -> device, and an event
    helper                  waits for: the first event and the end of its work on the device, both on the host
    compute                 `wait` on the host for the job, then on the device for that event

No further synchronization is needed: a page's weights are overwritten after its event, which is recorded after the last
kernel that read them; its staging buffer is written again only after the next use of the page, which waited for the
upload. On a CPU device the same jobs run in the same worker, with plain copies.

For a sharded page (offload/sharded.py) all of this holds for this rank's part. A resident part waits on the device
for its next gather, which the engine's own event orders behind the upload.

The part of the updates that the GPU makes (updates.py) goes through a lane, a ring of slots on the device, chunk by
chunk, on three streams that events alone order: one chunk is copied in while one is updated and one is copied back, and
the next part begins while the last one is still being copied back.

    up     waits for: the slot's last copy back;   then copies a chunk of every tensor in
    work   waits for: that;                        then updates the chunk
    down   waits for: that;                        then copies the chunk back
"""

import time
from collections.abc import Callable, Mapping

import torch

from keyhole.machine.gpu import accelerator
from keyhole.offload import arena
from keyhole.offload.downlink import Downlink
from keyhole.offload.engine import Engine
from keyhole.offload.slots import lend
from keyhole.offload.workers import DeviceJob, Job, Workers

Span = tuple[int, int]  # [begin, end) of a page
LANDING = 16 * 2**20  # elements of a master copy that are on the device at a time
SLOTS = 3  # of the lane
CHUNK = 4 * 2**20  # elements: 16 MiB of fp32, enough for a copy to run at the link's rate


def chunk_of(numel: int) -> int:
    """Elements per chunk for ranges of at most this many."""
    return min(CHUNK, numel)


class Exchange:
    """Sends gradients of pages to the host and brings their new weights back; it is the engine's gate. pages: those
    that will be rewritten. masters: by resident page, the source of its weights (else its staging buffer). most_bytes:
    of gradients that wait on the device for the link."""

    def __init__(
        self,
        engine: Engine,
        pages: list[int],
        pool: Workers,
        masters: Mapping[int, torch.Tensor] = {},
        most_bytes: int | None = None,
    ) -> None:
        self.engine, self.pool, self.cuda = engine, pool, engine.cuda
        self.down = Downlink(engine, most_bytes)
        self.staging = _staging(engine, {page: engine.kept(page) for page in pages})
        self.source = self.staging | dict(masters)
        self.leaving: set[int] = set()  # pages whose gradients are being sent and that have no job yet
        self.rewritten: set[int] = set()  # pages whose change must still be reported to a watch
        self.is_drained = True  # since the last gradient: whoever writes a home now is not overwritten
        self.wait_s = 0.0  # how long the launching thread has waited for jobs
        if self.cuda:
            self.up = accelerator.Stream(engine.device)
            self.uploaded = {page: accelerator.Event() for page in pages}
            self.landing = lend(torch.empty(LANDING if masters else 0, device=engine.device), [self.up])
        engine.gate = self

    # -- gradients to the host -------------------------------------------------------------------------------------

    def put(self, page: int, begin: int, grad: torch.Tensor) -> None:
        """Sends a gradient to its place in the page's staging buffer. From now on the page is not ready."""
        if page not in self.leaving:
            self.engine.before_change(page)
        self.leaving.add(page)
        self.is_drained = False
        self.rewritten.add(page)
        buffer = self.staging[page][begin : begin + grad.numel()]
        grad = grad.to(buffer.dtype).reshape(-1)
        self.engine.bytes_down += grad.nbytes
        self.down.send(grad, buffer)

    def sent(self) -> accelerator.Event | None:
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
        self, page: int, job: Job, after: accelerator.Event | None, back: Span, on_device: DeviceJob | None = None
    ) -> None:
        """Queues a job for the worker, which then sends this span of the page back. on_device: the same for the
        workers' helper, including the copy back. Pages that the next pass needs first have the lowest index, and are
        processed first."""

        def work() -> None:
            job()
            self.send_back(page, *back)

        self.pool.submit(work, page=page, after=after, urgency=page, on_device=on_device)
        self.leaving.discard(page)
        if page not in self.engine.on_host:
            self.engine.bytes_up += self.source[page][slice(*back)].nbytes

    def send_back(self, page: int, begin: int, end: int) -> None:
        """Uploads a span of a resident page; does nothing for a streamed page."""
        if page in self.engine.on_host:
            return
        # .data: otherwise autograd, which is differentiating a neighbour in the same memory, would count a change of it
        home, source = self.engine.kept(page).data[begin:end], self.source[page][begin:end]
        if not self.cuda:
            home.copy_(source)
            return
        with accelerator.device(self.engine.device), accelerator.stream(self.up):
            for part, target in zip(source.split(LANDING), home.split(LANDING), strict=True):
                if part.dtype != target.dtype:  # rounded on the device
                    part = self.landing[: part.numel()].copy_(part, non_blocking=True)
                target.copy_(part, non_blocking=True)
            self.uploaded[page].record(self.up)
            if page in self.engine.streamed:  # a resident part of a sharded page, which is gathered from here
                self.engine.home_written[page].record(self.up)

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
        if page in self.rewritten:
            self.rewritten.discard(page)
            self.engine.changed(page, self.engine.compute if self.cuda and page not in self.engine.on_host else None)

    def drain(self) -> None:
        """Blocks until every job is done and all weights sent back have arrived."""
        self.pool.drain()
        if self.cuda:
            self.up.synchronize()
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


def _staging(engine: Engine, kept: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The homes of streamed pages, and one page-locked allocation for all others."""
    own = [page for page in kept if page not in engine.on_host]
    sizes = [-(-kept[page].nbytes // 256) * 256 for page in own]
    flat = arena.host_memory(sum(sizes)).fill_(0)
    if engine.cuda:
        arena.pin(flat, engine.device)
    pieces = dict(zip(own, flat.split(sizes), strict=True))
    places = {page: pieces[page][: kept[page].nbytes].view(kept[page].dtype) for page in own}
    return {page: kept[page] for page in kept if page in engine.on_host} | places


class Lane:
    """A ring of slots on the device for host tensors of these dtypes. Only one thread may use it at a time."""

    def __init__(self, dtypes: list[torch.dtype], device: torch.device, chunk: int) -> None:
        self.chunk, self.turn = chunk, 0
        self.slots = [[torch.empty(chunk, dtype=dtype, device=device) for dtype in dtypes] for _ in range(SLOTS)]
        self.up, self.work, self.down = streams = [accelerator.Stream(device) for _ in range(3)]
        self.arrived, self.changed, self.left = ([accelerator.Event() for _ in range(SLOTS)] for _ in range(3))
        for buffer in (buffer for slot in self.slots for buffer in slot):
            lend(buffer, streams)

    def run(
        self, tensors: list[torch.Tensor], back: int, change: Callable[[int, list[torch.Tensor]], None]
    ) -> Callable[[], None]:
        """Sends flat host tensors through the device. change(begin, chunks) enqueues kernels on the chunks at `begin`;
        the first `back` tensors are copied back. Returns at once a function that blocks until all of it is done."""
        for begin in range(0, tensors[0].numel(), self.chunk):
            i, self.turn = self.turn % SLOTS, self.turn + 1
            homes = [flat[begin : begin + self.chunk] for flat in tensors]
            chunks = [buffer[: home.numel()] for buffer, home in zip(self.slots[i], homes, strict=True)]
            with accelerator.stream(self.up):
                self.up.wait_event(self.left[i])
                for home, there in zip(homes, chunks, strict=True):
                    there.copy_(home, non_blocking=True)
                self.arrived[i].record(self.up)
            with accelerator.stream(self.work):
                self.work.wait_event(self.arrived[i])
                change(begin, chunks)
                self.changed[i].record(self.work)
            with accelerator.stream(self.down):
                self.down.wait_event(self.changed[i])
                for home, there in zip(homes[:back], chunks, strict=False):
                    home.copy_(there, non_blocking=True)
                self.left[i].record(self.down)
        end = accelerator.Event(blocking=True)
        end.record(self.down)
        return end.synchronize
