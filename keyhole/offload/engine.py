"""Moves pages of memory between host and device, ahead of the work that needs them.

A page is a flat tensor at its home (host memory, or the device when it is resident). The worker sweeps over pages:

    w = engine.acquire(page)     the page on the device, in a slot
    ...                          enqueue kernels that read and write w
    engine.commit(page)          the kernels so far changed w: copy it home
    engine.release(page)         no later kernel touches w: the slot may take another page

Three CUDA streams work at once, ordered by events alone; the host never waits:

    upload     waits for: the slot's last user, and the page's last write-back;   then copies home -> slot
    compute    (the caller's stream) waits for: the upload
    download   waits for: the kernels before commit;                              then copies slot -> home

The order of pages is known ahead: it is what the last sweep of the same name did. So as soon as a slot is free, the
next page is on its way, past the end of a sweep into the next one. A wrong guess costs a wait, never a wrong value.

A freed slot keeps its page until another needs the memory, and a page that is wanted again while its slot still has it
as it is at home does not cross again: a sweep that turns round (forward, then reverse) finds its last pages there.

A page whose home is rewritten on the host (offload/exchange.py) has a gate: prefetch stops at a page that is not
ready, without waiting, and acquire waits for it.

Whoever must see homes as they are now while work goes on (checkpoint/snapshot.py) is a *watch*: it is told before a
home is changed, and may hold the host up until it has what it needs, and after.

Pages may differ in dtype and length. Bytes: slot_count x the largest page on the device; each page crosses once up
and, if committed, once down a sweep.
On a CPU device the same logic runs with plain copies.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from keyhole.offload.timeline import Timeline

POISON = 0xFF  # this byte over and over is NaN in fp32, bf16, fp16 and fp8


def _bytes(flat: torch.Tensor) -> int:
    return flat.numel() * flat.element_size()


class Gate(Protocol):
    """Who rewrites homes on the host."""

    def ready(self, page: int) -> bool:
        """Whether the home holds the page's weights; never waits."""

    def wait(self, page: int) -> None:
        """Returns when it does. Kernels that are launched afterwards on the compute stream may read the home."""

    def drain(self) -> None:
        """The same for all pages, and for the host."""

    def close(self) -> None:
        """Ends the work; nobody will ask for a page again."""


class Watch(Protocol):
    """Who wants to know when homes change."""

    def before_change(self, page: int) -> None:
        """Work that will change the home is about to be queued. May wait."""

    def changed(self, page: int, stream: "torch.cuda.Stream | None") -> None:
        """That work has been queued on this stream (None: it is done)."""


class _Slot:
    """A reused device buffer, and the events after which it may be overwritten."""

    def __init__(self, buffer: torch.Tensor, cuda: bool) -> None:
        self.buffer = buffer
        self.page: int | None = None  # what it holds, or will
        self.last_page: int | None = None  # what lies in it, perhaps still on its way home
        self.intact = False  # it lies there as it is at home
        if cuda:
            self.ready, self.computed, self.changed = (torch.cuda.Event() for _ in range(3))

    def like(self, home: torch.Tensor) -> torch.Tensor:
        """The front of the buffer, seen as a page of this dtype and length."""
        return self.buffer[: _bytes(home)].view(home.dtype)


class Engine:
    """Brings pages into slots before they are needed, and takes changed ones home.

    homes: one flat tensor a page. A page whose home is on `device` and is not in `streamed` never moves.
    overlap=False waits after every transfer; reuse_slots=False allocates a buffer per visit: both only for ablations.
    chaos: a random generator that delays streams and poisons freed slots, for tests of the ordering.
    """

    def __init__(
        self,
        homes: list[torch.Tensor],
        streamed: set[int],
        device: torch.device,
        *,
        slot_count: int = 3,
        overlap: bool = True,
        reuse_slots: bool = True,
        chaos: random.Random | None = None,
    ) -> None:
        self.homes, self.streamed, self.device = homes, streamed, device
        self.overlap, self.reuse_slots, self.chaos = overlap, reuse_slots, chaos
        self.cuda = device.type == "cuda"
        self.slot_bytes = max((_bytes(homes[page]) for page in streamed), default=0)
        self.slot_count = slot_count if streamed else 0
        self.slots = [_Slot(self._new_buffer(), self.cuda) for _ in range(self.slot_count)]
        self.free: deque[_Slot] = deque(self.slots)
        self.ahead: deque[_Slot] = deque()  # uploaded or on their way, in the order they will be asked for
        self.held: dict[int, _Slot] = {}
        self.orders: dict[str, list[int]] = {}
        self.order: list[int] = []
        self.cursor = 0
        self.visited: list[int] = []
        self.bytes_up = self.bytes_down = 0
        self.timeline: Timeline | None = None
        self.gate: Gate | None = None
        self.watch: Watch | None = None
        self.arrival: Callable[[int, torch.Tensor], bool] | None = None  # see acquire
        if self.cuda:
            self.compute = torch.cuda.current_stream(device)
            self.up, self.down = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.home_written = {page: torch.cuda.Event() for page in streamed}

    @contextmanager
    def sweep(self, name: str, guess: list[int], learn: bool = True) -> Iterator[None]:
        """One pass over pages. `guess` is the order expected when no sweep of this name was seen before;
        learn=False for work that goes round many times."""
        self.order = self.orders.get(name) or [page for page in guess if page in self.streamed]
        self.cursor, self.visited = 0, []
        if self.cuda:
            self.compute = torch.cuda.current_stream(self.device)  # asked once: a query takes longer than a wait
        expected = [slot.page for slot in self.ahead]
        if expected != self.order[: len(expected)]:
            self._drop_ahead()
        self._prefetch()
        try:
            yield
        except BaseException:  # an error, or an interrupt: nobody will release what is held
            for page in list(self.held):
                self.release(page)
            raise
        if self.visited and learn:
            self.orders[name] = self.visited

    def acquire(self, page: int, changes: bool = True) -> torch.Tensor:
        """The page on the device. changes=False: it will only be read. `arrival` sees the page first and may change it
        (an update that was due since the last use): if it says so, the page goes home."""
        if self.gate is not None:
            self.gate.wait(page)
        if page not in self.streamed:
            if changes and self.watch is not None:
                self.watch.before_change(page)
            self._arrived(page, self.homes[page])
            return self.homes[page]
        assert page not in self.held, f"page {page} is acquired already"
        while self.ahead and self.ahead[0].page != page and any(slot.page == page for slot in self.ahead):
            self._give_back(self.ahead.popleft())  # expected, but skipped this time
        if not (self.ahead and self.ahead[0].page == page):
            self._drop_ahead()
            self._upload(page)
        slot = self.ahead.popleft()
        self.held[page] = slot
        self.visited.append(page)
        if self.order[self.cursor : self.cursor + 1] == [page]:
            self.cursor += 1
        elif page in self.order:
            self.cursor = self.order.index(page) + 1
        self._prefetch()
        slot.intact = slot.intact and not changes and self.arrival is None
        if self.cuda:
            self.compute.wait_event(slot.ready)
            if not slot.intact:  # it may have been here since its last visit, and still be on its way home
                self.compute.wait_event(self.home_written[page])
        return self._arrived(page, slot.like(self.homes[page]))

    def _arrived(self, page: int, w: torch.Tensor) -> torch.Tensor:
        if self.arrival is not None and self.arrival(page, w):
            self.commit(page)
        return w

    def commit(self, page: int) -> None:
        if page not in self.streamed:
            self._tell(page, self.compute if self.cuda else None)
            return
        slot, home = self.held[page], self.homes[page]
        slot.intact = self.gate is None
        self.bytes_down += _bytes(home)
        if self.watch is not None:
            self.watch.before_change(page)
        if not self.cuda:
            home.copy_(slot.like(home))
            self._tell(page, None)
            return
        slot.changed.record(self.compute)
        with torch.cuda.stream(self.down):
            self._delay()
            self.down.wait_event(slot.changed)
            with self._span("write-back", page):
                home.copy_(slot.like(home), non_blocking=True)
            self.home_written[page].record(self.down)
        self._tell(page, self.down)
        if not self.overlap:
            torch.cuda.synchronize(self.device)

    def _tell(self, page: int, stream: "torch.cuda.Stream | None") -> None:
        if self.watch is not None:
            self.watch.changed(page, stream)

    def release(self, page: int) -> None:
        if page not in self.streamed:
            return
        slot = self.held.pop(page)
        if self.cuda:
            slot.computed.record(self.compute)
        if self.chaos and self.chaos.random() < 0.5:
            slot.intact = False
            if not self.cuda:
                slot.buffer.fill_(POISON)
        self._give_back(slot)
        self._prefetch()

    def invalidate(self) -> None:
        """Homes were written by somebody else: forget what was uploaded."""
        self._drop_ahead()
        for slot in self.slots:
            slot.intact = False

    def wait_for_homes(self, pages: Iterable[int] | None = None) -> None:
        """Blocks the host until every write-back has arrived: before anyone reads the homes (or these)."""
        if self.gate is not None:
            for page in pages or ():
                self.gate.wait(page)
            if pages is None:
                self.gate.drain()
        if self.cuda:
            self.down.synchronize()

    def home_ready(self, page: int) -> None:
        """Makes the caller's stream wait for the page's last write-back: before a kernel reads the home in place."""
        if self.gate is not None:
            self.gate.wait(page)
        if self.cuda and page in self.streamed:
            self.compute.wait_event(self.home_written[page])

    def _upload(self, page: int) -> None:
        slot, home = self._free_slot(page), self.homes[page]
        slot.page = page
        self.ahead.append(slot)
        if slot.intact and slot.last_page == page:
            return  # it has not left
        self.bytes_up += _bytes(home)
        if not self.reuse_slots:
            slot.buffer = self._new_buffer()
            if self.cuda:
                for stream in (self.up, self.down):
                    slot.buffer.record_stream(stream)
                self.up.wait_stream(self.compute)
        last_page, slot.last_page, slot.intact = slot.last_page, page, self.gate is None
        if not self.cuda:
            slot.like(home).copy_(home)
            return
        with torch.cuda.stream(self.up):
            self.up.wait_event(slot.computed)
            if last_page is not None:
                self.up.wait_event(self.home_written[last_page])
            self.up.wait_event(self.home_written[page])
            self._delay()
            if self.chaos:
                slot.buffer.fill_(POISON)
            with self._span("upload", page):
                slot.like(home).copy_(home, non_blocking=True)
            slot.ready.record(self.up)
        if not self.overlap:
            torch.cuda.synchronize(self.device)

    def _free_slot(self, page: int) -> _Slot:
        """The one that has the page still, else the one that is free for longest."""
        for slot in self.free:
            if self.gate is not None or not self.reuse_slots:
                slot.intact = False  # homes change without the engine, or buffers do
            elif slot.intact and slot.last_page == page:
                self.free.remove(slot)
                return slot
        return self.free.popleft()

    def _new_buffer(self) -> torch.Tensor:
        return torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device)

    def _prefetch(self) -> None:
        while self.free and self.order and (self.overlap or not self.held):
            page = self.order[(self.cursor + len(self.ahead)) % len(self.order)]
            if page in self.held or any(slot.page == page for slot in self.ahead):
                return
            if self.gate is not None and not self.gate.ready(page):
                return
            self._upload(page)
            if not self.overlap:
                return

    def _drop_ahead(self) -> None:
        while self.ahead:
            self._give_back(self.ahead.popleft())

    def _give_back(self, slot: _Slot) -> None:
        slot.page = None
        self.free.append(slot)

    def _delay(self) -> None:
        if self.chaos:
            torch.cuda._sleep(self.chaos.randrange(0, 2_000_000))

    def _span(self, lane: str, page: int) -> object:
        return (self.timeline or _NO_TIMELINE).span(lane, f"page {page}")


_NO_TIMELINE = Timeline(enabled=False)
