"""Moves pages of memory between host and device, ahead of the work that needs them.

A page (a unit of the model, by its index) is a flat tensor at its home: in host memory, or on the device when it is
resident. The caller sweeps over pages:

    w = engine.acquire(page)     the page on the device, in a slot
    ...                          enqueue kernels that read and write w
    engine.commit(page)          the kernels so far changed w: copy it home
    engine.release(page)         no later kernel touches w: the slot may take another page

Three CUDA streams work at once, ordered by events alone; the host never waits:

    upload     waits for: the slot's last user, and the page's last write-back;   then copies home -> slot
    compute    (the caller's stream) waits for: the upload
    download   waits for: the kernels before commit;                              then copies slot -> home

The order of pages is known ahead: it is that of the last sweep of the same name. As soon as a slot is free, the next
page is uploaded, also past the end of a sweep into the next one. A wrong guess costs a wait, never a wrong value. Where
the caller learns in the middle of a sweep which of some pages it needs (experts), it says so: `expect`.

A free slot keeps its page until the memory is needed (slots.py). Others may write homes, or must know when homes change
(protocols.py). A resident page is acquired and committed like any other, so that they learn of it too.

Pages may differ in dtype and length. Bytes: slot_count x the largest streamed page, on the device. Per sweep each page
crosses the link once up and, if it was committed, once down. On a CPU device the same logic runs with plain copies.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from keyhole.errors import UserError
from keyhole.offload.protocols import Gate, Watch
from keyhole.offload.slots import POISON, FreeSlots, Slot, page_bytes
from keyhole.offload.stalls import Stalls
from keyhole.offload.timeline import Timeline


class Engine:
    """Brings pages into slots before they are needed, and takes changed ones home.

    homes: one flat tensor per page. A page that is not in `streamed` has its home on `device` and never moves.
    overlap=False waits after every transfer; reuse_slots=False allocates a buffer per visit: both only for ablations.
    chaos: a random generator that delays streams and poisons freed slots, for tests of the ordering.
    shared: pages whose homes other processes upload too. Whoever commits one has made sure that none does meanwhile.
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
        shared: frozenset[int] = frozenset(),
    ) -> None:
        self.homes, self.streamed, self.device = homes, streamed, device
        self.on_host = streamed  # pages that are kept in host memory
        self.overlap, self.reuse_slots, self.chaos, self.shared = overlap, reuse_slots, chaos, shared
        self.cuda = device.type == "cuda"
        self.slot_bytes = max(map(self._room, streamed), default=0)
        self.slot_count = slot_count if streamed else 0
        self.slots = [Slot(self._new_buffer(), self.cuda) for _ in range(self.slot_count)]
        self.free = FreeSlots(self.slots)
        self.ahead: deque[Slot] = deque()  # uploaded or on their way, in the order they will be asked for
        self.held: dict[int, Slot] = {}
        self.orders: dict[str, list[int]] = {}
        self.order: list[int] = []
        self.visited: list[int] = []
        self.cursor = self.bytes_up = self.bytes_down = 0
        self.timeline = Timeline(enabled=False)
        self.gate: Gate | None = None
        self.watch: Watch | None = None
        self.stalls = Stalls()
        self.arrival: Callable[[int, torch.Tensor], bool] | None = None  # applies an update that is due: see acquire
        if self.cuda:
            self.compute = torch.cuda.current_stream(device)
            self.up, self.down = self.streams = [torch.cuda.Stream(device) for _ in range(2)]
            self._lend_slots(self.streams)
            self.ends_on = self.up  # where the last upload ends
            self.home_written = {page: torch.cuda.Event() for page in streamed}

    def _lend_slots(self, streams: "list[torch.cuda.Stream]") -> None:
        """Slots are used on these streams too. Their memory may have been somebody else's a moment ago, and is given to
        nobody else before the streams are done with it: when a model is dropped, pages are still on their way up."""
        for stream in streams:
            stream.wait_stream(self.compute)
            for slot in self.slots:
                slot.buffer.record_stream(stream)

    @contextmanager
    def sweep(self, name: str, guess: list[int], learn: bool = True, of_all: bool = False) -> Iterator[None]:
        """One pass over pages. `guess` is the order that is expected when no sweep of this name was seen before;
        learn=False: this sweep says nothing about the order of the next one. of_all: every process that shares homes
        makes this sweep, and asks nothing else of the others meanwhile (gather.py)."""
        self.order = self.orders.get(name) or [page for page in guess if page in self.streamed]
        self.cursor, self.visited = 0, []
        self.stalls.begin(name)
        if self.cuda:
            self.compute = torch.cuda.current_stream(self.device)  # once per sweep: asking takes longer than a wait
        if [slot.page for slot in self.ahead] != self.order[: len(self.ahead)]:
            self._drop_ahead()
        self._prefetch()
        try:
            yield
        except BaseException:  # an error, or an interrupt: nobody will release what is held
            for page in list(self.held):
                self.release(page)
            raise
        finally:
            self._left()
        if self.visited and learn:
            self.orders[name] = self.visited

    def expect(self, among: set[int], pages: list[int]) -> None:
        """Of the pages `among`, those that come next in this sweep are just these, in this order."""
        end = self.cursor
        while end < len(self.order) and self.order[end] in among:
            end += 1
        self.order = self.order[: self.cursor] + [page for page in pages if page in self.streamed] + self.order[end:]
        known = 0
        while known < len(self.ahead) and [self.ahead[known].page] == self.order[self.cursor + known :][:1]:
            known += 1
        for slot in list(self.ahead)[known:]:
            self.ahead.remove(slot)
            self.free.add(slot)
        self._prefetch()

    def acquire(self, page: int, changes: bool = True) -> torch.Tensor:
        """The page on the device. changes=False: it will only be read. `arrival` sees the page first and may change it
        (an update that has been due since the last use): if it says so, the page goes home."""
        self._left()
        if self.gate is not None:
            self.gate.wait(page)
        if page not in self.streamed:
            if changes or self.arrival is not None:
                self.before_change(page)
            return self._arrived(page, self.homes[page])
        assert page not in self.held, f"page {page} is acquired already"
        while self.ahead and self.ahead[0].page != page and any(slot.page == page for slot in self.ahead):
            self.free.add(self.ahead.popleft())  # expected before this page, but skipped this time
        if not (self.ahead and self.ahead[0].page == page):
            self._drop_ahead()
            self._upload(page)
        slot = self.ahead.popleft()
        self.held[page] = slot
        self.visited.append(page)
        if self.order[self.cursor : self.cursor + 1] == [page]:
            self.cursor += 1
        elif page in self.order:  # rather one that is still to come: a page may be there several times
            begin = self.cursor if page in self.order[self.cursor :] else 0
            self.cursor = self.order.index(page, begin) + 1
        self._prefetch()
        slot.intact = slot.intact and not changes and self.arrival is None and self.gate is None
        if self.cuda:
            with self.stalls.wait(self.compute):
                self.compute.wait_event(slot.ready)
                self.compute.wait_event(slot.computed)  # of its last visit, perhaps on another stream
                if not slot.intact:  # it will be changed, and may still be on its way home
                    self.compute.wait_event(self.home_written[page])
        return self._arrived(page, slot.as_page(self.homes[page]))

    def _left(self) -> None:
        """The caller asks for another page, or has ended its sweep."""
        if self.timeline.enabled:
            self.timeline.left(self.compute if self.cuda else None)

    def _arrived(self, page: int, w: torch.Tensor) -> torch.Tensor:
        if self.timeline.enabled:
            self.timeline.arrived(f"page {page}", self.compute if self.cuda else None)
        if self.arrival is not None and self.arrival(page, w):
            self.commit(page)
        return w

    def commit(self, page: int) -> None:
        """The kernels so far have changed the page: it goes home."""
        if page not in self.streamed:
            self.changed(page, self.compute if self.cuda else None)
            return
        slot, home = self.held[page], self.homes[page]
        self.before_change(page)
        self._write_back(page, slot)
        slot.intact = self.gate is None  # set last: a write-back that was interrupted leaves it False
        self.bytes_down += page_bytes(home)
        self.changed(page, self.down if self.cuda else None)

    def _write_back(self, page: int, slot: Slot) -> None:
        if not self.cuda:
            with self.timeline.span("write-back", f"page {page}"):
                self._copy_down(page, slot)
            return
        slot.changed.record(self.compute)
        with torch.cuda.stream(self.down):
            self._delay()
            self.down.wait_event(slot.changed)
            with self.timeline.span("write-back", f"page {page}"):
                self._copy_down(page, slot)
            self.home_written[page].record(self.down)
        if not self.overlap:
            torch.cuda.synchronize(self.device)

    def before_change(self, page: int) -> None:
        """Tells the watch, if there is one; also for a gate, which changes homes itself."""
        if self.watch is not None:
            self.watch.before_change(page)

    def changed(self, page: int, stream: "torch.cuda.Stream | None") -> None:
        """Tells the watch, if there is one."""
        if self.watch is not None:
            self.watch.changed(page, stream)

    def release(self, page: int) -> None:
        """No later kernel touches the page: its slot may take another one."""
        if page not in self.streamed:
            return
        slot = self.held.pop(page)
        if self.cuda:
            slot.computed.record(self.compute)
        if self.chaos and self.chaos.random() < 0.5:
            slot.intact = False
            if not self.cuda:
                slot.buffer.fill_(POISON)
        self.free.add(slot)
        self._prefetch()

    def invalidate(self, everywhere: bool = False) -> None:
        """Homes were written by somebody else: what was uploaded is forgotten. everywhere: every process that shares
        homes does this now."""
        self._drop_ahead()
        for slot in self.slots:
            slot.intact = False

    def wait_for_homes(self, pages: Iterable[int] | None = None) -> None:
        """Blocks the host until homes hold their weights: of these pages, by default of all."""
        if self.gate is not None:
            for page in pages or ():
                self.gate.wait(page)
            if pages is None:
                self.gate.drain()
        if self.cuda:
            self.down.synchronize()

    def home_ready(self, page: int) -> None:
        """Makes the compute stream wait for the page's last write-back, before a kernel reads the home in place."""
        if self.gate is not None:
            self.gate.wait(page)
        if self.cuda and page in self.streamed:
            self.compute.wait_event(self.home_written[page])

    def _upload(self, page: int) -> None:
        if not self.free:
            needed = len(self.held) + 1
            raise UserError(
                f"slot_count: {self.slot_count} is too few: at least {needed} pages must be on the device at the same "
                f"time; pass keyhole.load(..., slot_count={needed}) or more, or leave slot_count out"
            )
        slot = self.free.take(page, reuse=self._may_reuse(page))
        slot.page = page
        self.ahead.append(slot)
        if slot.intact and slot.last_page == page:
            return  # the page is still there
        self.bytes_up += self._crossing_bytes(page)
        if not self.reuse_slots:
            slot.buffer = self._new_buffer()
            if self.cuda:
                for stream in self.streams:
                    slot.buffer.record_stream(stream)
                self.up.wait_stream(self.compute)
        last_page, slot.last_page, slot.intact = slot.last_page, page, self.gate is None
        if not self.cuda:
            with self.timeline.span("upload", f"page {page}"):
                self._copy_up(page, slot)
            return
        with torch.cuda.stream(self.up):
            self.up.wait_event(slot.computed)
            self.up.wait_event(slot.ready)  # of a page that nobody asked for, perhaps on its way on another stream
            if last_page is not None:
                self.up.wait_event(self.home_written[last_page])
            self.up.wait_event(self.home_written[page])
            self._delay()
            if self.chaos:
                slot.buffer.fill_(POISON)
            with self.timeline.span("upload", f"page {page}"):
                self._copy_up(page, slot)
            slot.ready.record(self.ends_on)
        if not self.overlap:
            torch.cuda.synchronize(self.device)

    def parts(self) -> dict[int, tuple[int, torch.Tensor]]:
        """Of pages that are sharded (shards.py): this process's part, and the element at which it begins."""
        return {}

    def kept(self, page: int) -> torch.Tensor:
        """What this process keeps of a page: all of it, or its part."""
        return self.homes[page]

    def _room(self, page: int) -> int:
        """Bytes that a page takes in a slot."""
        return page_bytes(self.homes[page])

    def _crossing_bytes(self, page: int) -> int:
        """Bytes that an upload takes over the link."""
        return page_bytes(self.homes[page])

    def _may_reuse(self, page: int) -> bool:
        """Whether a slot that still holds the page will do."""
        return self.gate is None and self.reuse_slots

    def _copy_up(self, page: int, slot: Slot) -> None:
        slot.as_page(self.homes[page]).copy_(self.homes[page], non_blocking=True)

    def _copy_down(self, page: int, slot: Slot) -> None:
        self.homes[page].copy_(slot.as_page(self.homes[page]), non_blocking=True)

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
            self.free.add(self.ahead.popleft())

    def _delay(self) -> None:
        if self.chaos:
            torch.cuda._sleep(self.chaos.randrange(0, 2_000_000))
