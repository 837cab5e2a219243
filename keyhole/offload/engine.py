"""Moves pages of memory between host and device, and prefetches them before the kernels that need them.

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

The caller says in which order it will visit pages. As soon as a slot is free, the engine prefetches the next page, also
across the end of a sweep to its beginning: most sweeps are like the one before. A visit in another order costs a wait,
never a wrong value. If the caller learns only during a sweep which pages it needs (experts), it calls `expect`.

A free slot keeps its page until the memory is needed (slots.py). The caller acquires and commits resident pages too, so
that other readers and writers of homes see them. A *gate* rewrites homes on the host (adam_offload/exchange.py):
prefetch stops, without waiting, at a page that is not ready; acquire waits for the page. A *watch* needs the homes as
they were at one moment while training goes on (checkpoint/snapshot): the engine calls it before a home changes, where
it may block the host until it has what it needs, and again afterwards.

Pages may differ in dtype and length. Bytes: slot_count x the largest streamed page, on the device. Per sweep each page
crosses the link once H2D and, if it was committed, once D2H. On a CPU device the same logic runs with plain copies.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypedDict

import torch

from keyhole.errors import UserError
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.offload import arena
from keyhole.offload.slots import POISON, FreeSlots, Slot, lend
from keyhole.offload.stalls import Stalls


class Gate(Protocol):
    """Rewrites homes on the host, and notifies the engine's watch (engine.before_change, engine.changed)."""

    def ready(self, page: int) -> bool:
        """Whether the home holds the page's current weights. Never waits."""

    def wait(self, page: int) -> None:
        """Blocks until it does. Kernels launched afterwards on the compute stream may read the home."""

    def drain(self) -> None:
        """Blocks until all homes hold their current weights, for kernels and for the host."""

    def close(self) -> None:
        """Ends the work; the engine asks for no page afterwards."""


class Watch(Protocol):
    """Is notified when homes change."""

    def before_change(self, page: int) -> None:
        """Work that changes the home is about to be enqueued. May block."""

    def waits_for(self, page: int) -> bool:
        """Whether the home still lacks the change that the watch needs: the page must go home at its next use."""

    def changed(self, page: int, stream: "accelerator.Stream | None") -> None:
        """That work was enqueued on this stream (None: it is complete)."""


class EngineOptions(TypedDict):
    """Keywords of every engine."""

    slot_count: int
    overlap: bool
    reuse_slots: bool
    chaos: random.Random | None


class Engine:
    """Prefetches pages into slots, and writes changed pages back to their homes.

    homes: one flat tensor per page. A page that is not in `streamed` has its home on `device` and never moves.
    overlap=False waits after every transfer; reuse_slots=False allocates a buffer per visit: both only for ablations.
    chaos: a random generator that delays streams and poisons freed slots, for tests of the ordering.
    shared: pages whose homes other processes upload too. The code that commits one ensures that no upload is running.
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
        self.cuda = device.type == ACCELERATOR
        self.slot_bytes = max((homes[page].nbytes for page in streamed), default=0)
        self.slot_count = slot_count if streamed else 0
        self.slots = [Slot(self._new_buffer(), self.cuda) for _ in range(self.slot_count)]
        self.free = FreeSlots(self.slots)
        self.ahead: deque[Slot] = deque()  # prefetched slots, in the order in which they will be acquired
        self.held: dict[int, Slot] = {}
        self.order: list[int] = []  # of the streamed pages of this sweep
        self.visited: list[int] = []  # the streamed pages that were acquired in it
        self.cursor = self.bytes_up = self.bytes_down = 0  # cursor: the next place in the order
        self.gate: Gate | None = None
        self.watch: Watch | None = None
        self.stalls = Stalls()
        self.arrival: Callable[[int, torch.Tensor], bool] | None = None  # applies a deferred update: see acquire
        if self.cuda:
            self.compute = accelerator.current_stream(device)
            self.up, self.down = self.streams = [accelerator.Stream(device) for _ in range(2)]
            for slot in self.slots:
                lend(slot.buffer, self.streams)
            self.home_written = {page: accelerator.Event() for page in streamed}

    @contextmanager
    def sweep(self, name: str, order: list[int]) -> Iterator[None]:
        """One pass over pages, in this order."""
        self.order, self.cursor = [page for page in order if page in self.streamed], 0
        self.visited = []
        self.stalls.begin(name)
        if self.cuda:
            self.compute = accelerator.current_stream(self.device)  # once per sweep: this call costs more than a wait
        if [slot.page for slot in self.ahead] != self.order[: len(self.ahead)]:
            self._drop_ahead()
        self._prefetch()
        try:
            yield
        except BaseException:  # an error or an interrupt: the caller will not release the pages that it holds
            self.order = []  # nothing is uploaded any more: uploads may be collectives, and other ranks are elsewhere
            for page in list(self.held):
                self.release(page)
            raise

    def expect(self, among: set[int], pages: list[int]) -> None:
        """Corrects the expected order: the next pages of the set `among` are exactly `pages`, in this order."""
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
        """The page on the device. changes=False: it will only be read. `arrival` is called first and may change the
        page (apply a deferred update); if it returns True, the page is written back."""
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
        for place in range(self.cursor, self.cursor + len(self.order)):  # the next of its occurrences, round the end
            if self.order[place % len(self.order)] == page:
                self.cursor = place % len(self.order) + 1
                break
        self._prefetch()
        slot.intact = slot.intact and not changes and self.arrival is None and self.gate is None
        if self.cuda:
            self.stalls.mark(self.compute)
            self.compute.wait_event(slot.ready)
            self.compute.wait_event(slot.computed)  # kernels of the last visit, perhaps on another stream
            if not slot.intact:  # it will be changed while its last write-back may still be running
                self.compute.wait_event(self.home_written[page])
            self.stalls.mark(self.compute)
        return self._arrived(page, slot.as_page(self.homes[page]))

    def _arrived(self, page: int, w: torch.Tensor) -> torch.Tensor:
        if self.arrival is not None and self.arrival(page, w):
            self.commit(page)
        return w

    def commit(self, page: int) -> None:
        """Writes the page back home: the kernels launched so far have changed it."""
        if page not in self.streamed:
            self.changed(page, self.compute if self.cuda else None)
            return
        slot, home = self.held[page], self.homes[page]
        self.before_change(page)
        self._write_back(page, slot)
        slot.intact = self.gate is None  # set last: a write-back that was interrupted leaves it False
        self.bytes_down += home.nbytes
        self.changed(page, self.down if self.cuda else None)

    def _write_back(self, page: int, slot: Slot) -> None:
        if not self.cuda:
            self._copy_down(page, slot)
            return
        slot.changed.record(self.compute)
        with accelerator.stream(self.down):
            self._delay()
            self.down.wait_event(slot.changed)
            self._copy_down(page, slot)
            self.home_written[page].record(self.down)
        if not self.overlap:
            accelerator.synchronize(self.device)

    def before_change(self, page: int) -> None:
        """Notifies the watch, if any, before a home changes; a gate, which writes homes itself, calls it too."""
        if self.watch is not None:
            self.watch.before_change(page)

    def changed(self, page: int, stream: "accelerator.Stream | None") -> None:
        """Notifies the watch, if there is one, that the change of a home was enqueued on the stream."""
        if self.watch is not None:
            self.watch.changed(page, stream)

    def release(self, page: int) -> None:
        """Frees the page's slot: no later kernel touches the page."""
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

    def invalidate(self) -> None:
        """Discards all uploaded pages, because other code has written homes."""
        self._drop_ahead()
        for slot in self.slots:
            slot.intact = False

    def wait_for_homes(self, pages: Iterable[int] | None = None) -> None:
        """Blocks the host until the homes of these pages (default: of all pages) hold their current weights."""
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
        slot = self.free.take(page, reuse=self.gate is None and self.reuse_slots)
        slot.page = page
        if not (slot.intact and slot.last_page == page):  # else the slot still holds the page
            try:
                self._fill(page, slot)
            except BaseException:  # out of memory, an interrupt: the slot holds nothing that may be used
                slot.intact = False
                self.free.add(slot)
                raise
        self.ahead.append(slot)

    def _fill(self, page: int, slot: Slot) -> None:
        """Copies the page's home into the slot."""
        self.bytes_up += self.homes[page].nbytes
        if not self.reuse_slots:
            slot.use(self._new_buffer())
            if self.cuda:
                lend(slot.buffer, self.streams)
        last_page, slot.last_page, slot.intact = slot.last_page, page, self.gate is None
        if not self.cuda:
            self._copy_up(page, slot)
            return
        with accelerator.stream(self.up):
            self.up.wait_event(slot.computed)
            self.up.wait_event(slot.ready)  # of a prefetched page that was not used, perhaps still in flight
            if last_page is not None:
                self.up.wait_event(self.home_written[last_page])
            self.up.wait_event(self.home_written[page])
            self._delay()
            if self.chaos:
                slot.buffer.fill_(POISON)
            self._copy_up(page, slot)
            slot.ready.record(self.up)
        if not self.overlap:
            accelerator.synchronize(self.device)

    def _prefetch(self) -> None:
        while self.free and self.order and (self.overlap or not self.held):
            place = self.cursor + len(self.ahead)
            if place >= len(self.order) and not self._goes_round():
                return
            page = self.order[place % len(self.order)]
            if page in self.held or any(slot.page == page for slot in self.ahead) or not self._may_prefetch(page):
                return
            self._upload(page)
            if not self.overlap:
                return

    def host_memory(self) -> list[torch.Tensor]:
        """The host memory that holds streamed homes: one tensor, or two if ranks share some of the homes."""
        flats = [*(self.homes[page] for page in sorted(self.streamed)), *(flat for _, flat in self.parts().values())]
        storages = {flat.untyped_storage().data_ptr(): flat for flat in flats if flat.device.type == "cpu"}
        return [arena.storage_of(flat) for flat in storages.values()]

    # -- what differs where ranks have parts of pages (sharded.py) -----------------------------------------------------

    def parts(self) -> dict[int, tuple[int, torch.Tensor]]:
        """For sharded pages: the index of the first element of this process's shard, and the shard."""
        return {}

    def kept(self, page: int) -> torch.Tensor:
        """The part of a page that this process stores: all of it, or its shard."""
        return self.homes[page]

    def _goes_round(self) -> bool:
        """Whether the first pages of the next sweep are prefetched at the end of this one."""
        return True

    def _may_prefetch(self, page: int) -> bool:
        return self.gate is None or self.gate.ready(page)

    def _copy_up(self, page: int, slot: Slot) -> None:
        slot.as_page(self.homes[page]).copy_(self.homes[page], non_blocking=True)

    def _copy_down(self, page: int, slot: Slot) -> None:
        self.homes[page].copy_(slot.as_page(self.homes[page]), non_blocking=True)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _new_buffer(self) -> torch.Tensor:
        return torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device)

    def _drop_ahead(self) -> None:
        while self.ahead:
            self.free.add(self.ahead.popleft())

    def _delay(self) -> None:
        if self.chaos:
            accelerator._sleep(self.chaos.randrange(0, 2_000_000))
