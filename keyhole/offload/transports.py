"""Pages of several ranks: those that they share, and those of which each has a part. Beneath one engine (engine.py)
that visits pages, a subclass says how a page gets into a slot and home again.

# Gathered: each rank of a machine uploads a part of a page, and an all-gather gives every rank the whole page

K ranks share the homes of streamed pages (arena.py), and each needs all n bytes of a page on its own GPU. With p
bytes/s over a GPU's own link to the host (PCIe), v from the other GPUs (NVLink), h from host memory, all ranks at once:

    upload all      n over every link                          max(n / p, K n / h) per page
    gather          k = n / K over every link, (K - 1) k       max(n / (K p), (K - 1) n / (K v), n / h)
                    from the neighbours

An upload has two stages on two streams: the rank copies its part [r k, (r + 1) k) of the page to its place in the slot,
then an in-place all-gather fills in the other parts. While one page is gathered, the part of the next one crosses the
link. k is rounded up to ALIGN; the padding after the page's end is never read. The slot ends up with the same bits as
after a whole upload. Without NVLink the other ranks' parts cross the same PCIe links, and nothing is gained. So both
ways are timed at the start on pages of the model, on all ranks at once; the time of the slowest rank counts. The ranks
exchange their times, so all of them decide alike.

**Order.** A gather is a collective: all ranks of the machine must issue the same gathers in the same order. But ranks
may visit different pages: their tokens reach other experts, a rank has no batch in a short step, ranks run different
numbers of evaluations between two steps, and in a flush each visits only its own pages. So gathers do not follow the
visits. In a sweep that all ranks make (`of_all`) they follow its list of shared pages, which is the same on all ranks:

    gather      the upload of a page whose gather is still to come. Gathers that this rank skipped come first, into the
                same slot, because other ranks need them
    else        (gathered before, not in the list, or the sweep is not `of_all`) the page is uploaded whole
    end         of the sweep: the rank issues the gathers that are left

A rank that visits pages in the order of the list gathers each once and does nothing else; a rank that deviates gets
correct pages, more slowly. A page of the list is never taken from a free slot that still holds it (slots.py), and none
is prefetched for the next sweep, because that differs between ranks. Ranks issue no other collective within such a
sweep, so they cannot deadlock. On one machine gathers and exchanged losses share a NCCL communicator, which runs them
in the order in which the hosts issue them.

**One writer.** A shared home changes only in a flush that all ranks make together (methods/zo/write_back.py), between
two barriers. Before the first barrier every rank synchronizes its GPU, so all gathers of the old bytes are complete;
before the second barrier every writer waits for its copies. Within `of_all` sweeps shared homes are never committed.

Bytes per page and rank: k over the link, (K - 1) k received; slots are larger by less than K ALIGN bytes.
Tested with gloo between processes on a CPU. NCCL between several GPUs is untested.

# Sharded: every rank stores 1 / N of a page, at the price of one collective per visit

A page of n elements is cut into N parts of k = n / N elements, rounded up to PART; rank r has [r k, (r + 1) k). Parts
are in host memory (streamed) or on the device (resident). Visits work as in the engine, with two differences:

    upload      the rank copies its part to the device (over its own link), and an all-gather fills the slot
    commit      only this rank's part of the slot is written back; the slot is not reused, because the other ranks'
                parts have changed too

All ranks must visit the same pages in the same order, so that their collectives match: the order of uploads depends
only on the order of acquire and release, never on anything that differs between ranks. Prefetch works as usual, as far
as there are slots. Only a gate (engine.py) depends on timing: where one process would skip a page that is not ready
and check again later, a rank waits for it. A rank prefetches no page that this sweep has begun to rewrite, and none of
the next sweep.

Bytes per visit and rank: k H2D, (N - 1) k received; slots hold whole pages.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Unpack

import torch

from keyhole.offload.engine import Engine, EngineOptions
from keyhole.offload.slots import Slot, lend
from keyhole.ranks import Ranks

ALIGN = 512  # bytes of a part that is gathered
PART = 64  # elements of a shard
PAGES = 4  # number of pages that are timed
MARGIN = 0.9  # gathering must take less than this share of the time of whole uploads: its kernels use part of the GPU
WAYS = ("auto", "always", "never")


class GatheringEngine(Engine):
    """An engine for ranks that share homes. It uploads whole pages until `decide` chooses gathering. chosen: pages
    whose visits depend on a rank's batch (experts); they are not gathered."""

    def __init__(
        self,
        homes: list[torch.Tensor],
        streamed: set[int],
        device: torch.device,
        ranks: Ranks,
        *,
        chosen: frozenset[int] = frozenset(),
        shared: frozenset[int] = frozenset(),
        **options: Unpack[EngineOptions],
    ) -> None:
        self.ranks, self.chosen = ranks, chosen
        self.gathers = False  # the result of `decide`
        self.places: dict[int, int] = {}  # page that this sweep gathers -> its place in their order
        self.made = 0  # number of gathers in this sweep
        super().__init__(homes, streamed, device, shared=shared, **options)
        if self.cuda:
            self.between = torch.cuda.Stream(device)
            self.streams.append(self.between)
            for slot in self.slots:
                lend(slot.buffer, [self.between])

    # -- whether to gather -----------------------------------------------------------------------------------------

    def decide(self, way: str) -> str:
        """Decides whether `of_all` sweeps gather; called by all ranks after homes are filled. way: auto or always.
        Returns the decision and its reason."""
        count = self.ranks.local_size
        parts = f"uploads: each of {count} ranks takes 1/{count} of a unit over its link and gathers the rest"
        whole = f"uploads: each of {count} ranks takes all of a unit over its link"
        if way == "always":
            self.gathers = True
            return f"{parts} (offload.gather=always)"
        pages = sorted(self.shared, key=lambda page: self.homes[page].nbytes, reverse=True)[:PAGES]
        everyone = self.ranks.objects((self._seconds(pages, False), self._seconds(pages, True)))
        whole_s, parts_s = (max(seconds) for seconds in zip(*everyone, strict=True))
        self.gathers = parts_s < MARGIN * whole_s
        gb = sum(self.homes[page].nbytes for page in pages) / 1e9
        rates = f"measured: {gb / parts_s:.3g} GB/s by parts, {gb / whole_s:.3g} GB/s whole"
        return f"{parts if self.gathers else whole} ({rates})"

    def _seconds(self, pages: list[int], gathering: bool) -> float:
        """Seconds to upload these pages on all ranks at once, measured the second time."""
        counted, seconds = self.bytes_up, 0.0
        for _ in range(2):
            self.invalidate()
            self._synchronize()
            self.ranks.barrier()
            begin_s = time.perf_counter()
            self._agree(pages if gathering else [])
            for page in pages:
                self._upload(page)
                self._drop_ahead()
            self._synchronize()
            seconds = time.perf_counter() - begin_s
        self.invalidate()
        self.bytes_up = counted
        return seconds

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    # -- the order of gathers --------------------------------------------------------------------------------------

    def _agree(self, pages: Iterable[int]) -> None:
        """These pages are to be gathered, in this order."""
        self.places, self.made = {page: place for place, page in enumerate(dict.fromkeys(pages))}, 0
        if self.places:
            self._drop_ahead()

    @contextmanager
    def sweep(self, name: str, order: list[int], of_all: bool = False) -> Iterator[None]:
        gathers = of_all and self.gathers
        self._agree(page for page in order if gathers and page in self.shared - self.chosen)
        try:
            with super().sweep(name, order, of_all):
                yield
                for page in list(self.places)[self.made :]:
                    self._drop_ahead()
                    self._upload(page)
        finally:
            self.made = len(self.places)

    def _goes_round(self) -> bool:
        return not self.places

    def _due(self, page: int) -> list[int]:
        """The pages to gather for an upload of this page: the skipped ones, then itself. Empty: upload it whole."""
        return list(self.places)[self.made : self.places.get(page, -1) + 1]

    # -- one page --------------------------------------------------------------------------------------------------

    def _part_bytes(self, page: int) -> int:
        return -(-self.homes[page].nbytes // (self.ranks.local_size * ALIGN)) * ALIGN

    def _own(self, page: int) -> slice:
        """This rank's part of a page, in bytes; it may be shortened by the page's end, or empty."""
        part, size = self._part_bytes(page), self.homes[page].nbytes
        return slice(min(self.ranks.local_rank * part, size), min((self.ranks.local_rank + 1) * part, size))

    def _room(self, page: int) -> int:
        return self.ranks.local_size * self._part_bytes(page) if page in self.shared else super()._room(page)

    def _crossing_bytes(self, page: int) -> int:
        parts = [self._own(each) for each in self._due(page)]
        return sum(part.stop - part.start for part in parts) if parts else super()._crossing_bytes(page)

    def _may_reuse(self, page: int) -> bool:
        return not self._due(page) and super()._may_reuse(page)

    def _copy_up(self, page: int, slot: Slot) -> None:
        due = self._due(page)
        if self.cuda:
            self.ends_on = self.between if due else self.up
        if not due:
            super()._copy_up(page, slot)
        for number, each in enumerate(due):
            if self.cuda and number:  # the slot is still being filled with the page before
                self.up.wait_stream(self.between)
            self._gather(each, slot)
        self.made += len(due)

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


def part_numel(numel: int, size: int) -> int:
    """Elements in one of `size` parts of a page."""
    return -(-numel // (size * PART)) * PART


class ShardedEngine(Engine):
    """numels: number of elements of each sharded page; homes[page] is this rank's part of it. streamed: pages (or
    parts) in host memory."""

    def __init__(
        self,
        homes: list[torch.Tensor],
        numels: dict[int, int],
        streamed: set[int],
        device: torch.device,
        ranks: Ranks,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.numels, self.ranks = numels, ranks
        self.own = {page: homes[page] for page in numels}
        whole = [
            torch.empty(home.numel() * ranks.size, dtype=home.dtype, device="meta") if page in numels else home
            for page, home in enumerate(homes)
        ]
        super().__init__(whole, streamed | set(numels), device, **options)
        self.on_host = streamed
        self.rewritten: set[int] = set()  # pages that a gate rewrites in this sweep, the same on every rank

    @contextmanager
    def sweep(self, name: str, order: list[int], of_all: bool = False) -> Iterator[None]:
        self.rewritten.clear()
        with super().sweep(name, order, of_all):
            yield

    def before_change(self, page: int) -> None:
        super().before_change(page)
        self.rewritten.add(page)
        if self.gate is not None and any(slot.page == page for slot in self.ahead):
            self._drop_ahead()

    def parts(self) -> dict[int, tuple[int, torch.Tensor]]:
        return {page: (self.ranks.rank * part.numel(), part) for page, part in self.own.items()}

    def kept(self, page: int) -> torch.Tensor:
        return self.own.get(page, self.homes[page])

    def on_device(self, page: int) -> torch.Tensor:
        """A sharded page that is acquired, with its padding."""
        return self.held[page].as_page(self.homes[page])

    def acquire(self, page: int, changes: bool = True) -> torch.Tensor:
        w = super().acquire(page, changes)
        return w[: self.numels[page]] if page in self.numels else w

    def commit(self, page: int) -> None:
        super().commit(page)
        if page in self.numels:
            self.held[page].intact = False

    def _goes_round(self) -> bool:
        return self.gate is None

    def _may_prefetch(self, page: int) -> bool:
        if self.gate is not None:
            if page in self.rewritten:
                return False
            self.gate.wait(page)
        return True

    def _copy_up(self, page: int, slot: Slot) -> None:
        if page not in self.numels:
            super()._copy_up(page, slot)
            return
        part = self.own[page].to(self.device, non_blocking=True)
        self.ranks.gather_into(slot.as_page(self.homes[page]), part)

    def _copy_down(self, page: int, slot: Slot) -> None:
        if page not in self.numels:
            super()._copy_down(page, slot)
            return
        begin, part = self.ranks.rank * self.own[page].numel(), self.own[page]
        part.copy_(slot.as_page(self.homes[page])[begin : begin + part.numel()], non_blocking=True)
