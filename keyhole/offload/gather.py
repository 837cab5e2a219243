"""The ranks of a machine upload a part of a page each, and get the rest from their neighbours.

K ranks share the homes of streamed pages (arena.py), and each needs all n bytes of a page on its own GPU. With p
bytes/s over a GPU's own link to the host (PCIe), v from the other GPUs (NVLink), h from host memory, all ranks at once:

    upload all      n over every link                          max(n / p, K n / h) per page
    gather          k = n / K over every link, (K - 1) k       max(n / (K p), (K - 1) n / (K v), n / h)
                    from the neighbours

An upload is two stages on two streams: this rank's part [r k, (r + 1) k) of the page is copied into its place in the
slot, and an all-gather in place fills in the others. While one page is gathered, the part of the next one crosses the
link. k is rounded up to ALIGN; what lies behind the page's end is room in the slot that nobody reads. The bits in the
slot are those of an upload of all of it. Without NVLink the neighbours' parts cross the same links after all; so both
ways are timed at the start, all ranks at once, on pages of the model, and the slowest rank counts. (The numbers are
exchanged: all ranks decide alike.)

**Order.** A gather takes all ranks of the machine: they must make the same ones in the same order. What a rank visits
may differ from what others visit, though: it meets other experts, or has no batch at all in a short step; and between
two steps it makes another number of evaluations, and in a flush visits its own pages alone. So gathers do not follow
the visits. They follow a list that was agreed on, the *lap*, in every sweep that all ranks make (`of_all`):

    lap     the shared pages that the first rank of the machine with a batch visited in the first such sweep, in that
            order
    turn    of a page: its place in the lap, if its gather is still to come; then its upload is a gather. Gathers that
            this rank passed over are made first, for the others, into the same slot
    else    (the page had its turn, is not in the lap, or the sweep is not of all) its upload is a whole one
    end     of the sweep: what is left of the lap is made up for, and so is the beginning of the next lap, as far as
            slots reach: what the engine prefetches anyway

A rank whose visits follow the lap gathers every page once, and that is all; one that strays has correct pages, more
slowly. No page of the lap is taken from a free slot that happens to hold it (slots.py): that differs between ranks.
Within a sweep of all, ranks ask nothing else of each other: nobody can wait for one who waits for him. On one machine
gathers and exchanged losses share a NCCL communicator, which runs them as the hosts issue them: in one order.

**One writer.** A shared home changes in a flush that all ranks make together (methods/zo/write_back.py), between two
barriers: before the first, every rank has waited for its GPU, so all gathers of the old bytes are over; after the
second, every writer has waited for its copies. Within sweeps of all, shared homes are never committed.

Bytes per page and rank: k over the link, (K - 1) k received; slots are larger by less than K ALIGN bytes.
Tested with gloo between processes on a CPU. NCCL between several GPUs is untested.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from keyhole.offload.engine import Engine
from keyhole.offload.slots import Slot, page_bytes
from keyhole.ranks import Ranks

ALIGN = 512  # bytes
PAGES = 4  # that are timed
MARGIN = 0.9  # a gather has to be faster by that: its kernels take a part of the GPU
WAYS = ("auto", "always", "never")


class GatheringEngine(Engine):
    """An engine for ranks that share homes. It uploads all of a page until `decide` has said otherwise. chosen: pages
    that a rank visits or not, as its batch has it; they are not gathered."""

    def __init__(
        self,
        homes: list[torch.Tensor],
        streamed: set[int],
        device: torch.device,
        ranks: Ranks,
        *,
        chosen: frozenset[int] = frozenset(),
        **options: Any,
    ) -> None:
        self.ranks, self.chosen = ranks, chosen
        self.gathers = False  # decided
        self.gathering = False  # in a sweep of all, now
        self.lap: list[int] = []
        self.places: dict[int, int] = {}  # of pages in the lap
        self.beyond = 0  # how many gathers of the next lap a sweep makes
        self.made = 0  # gathers since the lap began
        super().__init__(homes, streamed, device, **options)
        ranks.meet_neighbours()
        if self.cuda:
            self.between = torch.cuda.Stream(device)
            self.streams.append(self.between)
            self._lend_slots([self.between])

    # -- whether ---------------------------------------------------------------------------------------------------

    def decide(self, way: str) -> str:
        """Whether sweeps of all gather; called by all ranks when homes are filled. way: auto or always. Returns what
        was decided, and why."""
        count = self.ranks.local_size
        parts = f"uploads: each of {count} ranks takes 1/{count} of a unit over its link and gathers the rest"
        whole = f"uploads: each of {count} ranks takes all of a unit over its link"
        if way == "always":
            self.gathers = True
            return f"{parts} (offload.gather=always)"
        pages = sorted(self.shared, key=lambda page: page_bytes(self.homes[page]), reverse=True)[:PAGES]
        everyone = self.ranks.objects((self._seconds(pages, False), self._seconds(pages, True)))
        whole_s, parts_s = (max(seconds) for seconds in zip(*everyone, strict=True))
        self.gathers = parts_s < MARGIN * whole_s
        gb = sum(page_bytes(self.homes[page]) for page in pages) / 1e9
        rates = f"measured: {gb / parts_s:.3g} GB/s by parts, {gb / whole_s:.3g} GB/s whole"
        return f"{parts if self.gathers else whole} ({rates})"

    def _seconds(self, pages: list[int], gathering: bool) -> float:
        """Of uploads of these pages, all ranks at once, the second time."""
        counted, seconds = self.bytes_up, 0.0
        for _ in range(2):
            self.invalidate()
            self._synchronize()
            self.ranks.barrier()
            begin_s = time.perf_counter()
            self._agree(pages, 0)
            self.gathering = gathering
            for page in pages:
                self._upload(page)
                self._drop_ahead()
            self._synchronize()
            seconds = time.perf_counter() - begin_s
            self.gathering = False
        self._agree([], 0)
        self.invalidate()
        self.bytes_up = counted
        return seconds

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    # -- when ------------------------------------------------------------------------------------------------------

    def _agree(self, lap: list[int], beyond: int) -> None:
        self.lap, self.beyond, self.made = lap, beyond, 0
        self.places = {page: place for place, page in enumerate(lap)}

    @contextmanager
    def sweep(self, name: str, guess: list[int], learn: bool = True, of_all: bool = False) -> Iterator[None]:
        self.gathering = of_all and bool(self.lap)
        try:
            with super().sweep(name, guess, learn, of_all):
                yield
            if self.gathering:
                self._end_lap()
            elif of_all and self.gathers:
                self._find_lap()
        finally:
            self.gathering = False

    def _find_lap(self) -> None:
        """After the first sweep of all; after a later one, as long as no rank of some machine has visited anything: all
        machines agree at once, for all ranks ask each other here."""
        visits = list(dict.fromkeys(self.visited))
        common = self.shared - self.chosen
        lap = [page for page in visits if page in common]
        own = lap, len(set(lap) & set(visits[: self.slot_count]))
        said = self.ranks.objects((self.ranks.machine, self.ranks.local_rank, own))
        firsts: dict[str, Any] = {}
        for machine, _, its in sorted(said, key=lambda one: one[1]):
            firsts[machine] = firsts.get(machine) or (its if its[0] else None)
        if all(firsts.values()):
            self._agree(*firsts[self.ranks.machine])

    def _turn(self, page: int) -> int | None:
        """The number of the page's gather, if it is still to come."""
        if not self.gathering or page not in self.places:
            return None
        length, place = len(self.lap), self.places[page]
        if self.made < length:
            return place if place >= self.made else None
        return length + place if self.made <= length + place < length + self.beyond else None

    def _end_lap(self) -> None:
        """Makes the gathers that are left; those of the next lap stay ahead."""
        length = len(self.lap)
        if self.made < length + self.beyond:
            self._drop_ahead()
        while self.made < length + self.beyond:
            if not self.free:
                self._drop_ahead()
            self._upload(self.lap[self.made % length])
            if self.made <= length:
                self._drop_ahead()
        self.made = self.beyond

    def invalidate(self, everywhere: bool = False) -> None:
        super().invalidate(everywhere)
        if everywhere:
            self.made = 0

    # -- one page --------------------------------------------------------------------------------------------------

    def _part_bytes(self, page: int) -> int:
        return -(-page_bytes(self.homes[page]) // (self.ranks.local_size * ALIGN)) * ALIGN

    def _own(self, page: int) -> slice:
        """This rank's part of a page, in bytes; it may be cut short, or empty."""
        part, size = self._part_bytes(page), page_bytes(self.homes[page])
        return slice(min(self.ranks.local_rank * part, size), min((self.ranks.local_rank + 1) * part, size))

    def _room(self, page: int) -> int:
        return self.ranks.local_size * self._part_bytes(page) if page in self.shared else super()._room(page)

    def _due(self, page: int) -> list[int]:
        """What is gathered for an upload of the page: itself, after those that were passed over; none: not now."""
        turn = self._turn(page)
        return [] if turn is None else [self.lap[i % len(self.lap)] for i in range(self.made, turn + 1)]

    def _crossing_bytes(self, page: int) -> int:
        parts = [self._own(each) for each in self._due(page)]
        return sum(part.stop - part.start for part in parts) if parts else super()._crossing_bytes(page)

    def _may_reuse(self, page: int) -> bool:
        return self._turn(page) is None and super()._may_reuse(page)

    def _copy_up(self, page: int, slot: Slot) -> None:
        due = self._due(page)
        if not due:
            super()._copy_up(page, slot)
        for number, each in enumerate(due):
            if self.cuda and number:  # the slot is still being filled with another
                self.up.wait_stream(self.between)
            self._gather(each, slot)
        self.made += len(due)
        if self.cuda:
            self.ends_on = self.between if due else self.up

    def _gather(self, page: int, slot: Slot) -> None:
        own = self._own(page)
        slot.buffer[own].copy_(self.homes[page].view(torch.uint8)[own], non_blocking=True)
        whole = slot.buffer[: self._room(page)]
        if not self.cuda:
            self.ranks.gather_on_machine(whole)
            return
        self.between.wait_stream(self.up)
        with torch.cuda.stream(self.between), self.timeline.span("upload", f"page {page}, gathered"):
            self.ranks.gather_on_machine(whole)
