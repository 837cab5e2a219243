"""The ranks of a machine upload a part of a page each, and get the rest from their neighbours.

K ranks share the homes of streamed pages (arena.py), and each needs all n bytes of a page on its own GPU. With p
bytes/s over a GPU's own link to the host (PCIe), v from the other GPUs (NVLink), h from host memory, all ranks at once:

    upload all      n over every link                          max(n / p, K n / h) per page
    gather          k = n / K over every link, (K - 1) k       max(n / (K p), (K - 1) n / (K v), n / h)
                    from the neighbours

An upload is two stages on two streams: this rank's part [r k, (r + 1) k) of the page is copied into its place in the
slot, and an all-gather in place fills in the others. While one page is gathered, the part of the next one crosses the
link. k is rounded up to ALIGN; what lies behind the page's end is room in the slot that nobody reads. The bits in the
slot are those of an upload of all of it. Without NVLink the neighbours' parts cross the same links as before, and more
slowly; so both ways are timed at the start, all ranks at once, on pages of the model, and the slowest rank counts. (The
numbers are exchanged: all ranks decide alike.)

**Order.** A gather takes all ranks of the machine: they must make the same gathers in the same order. So pages are
gathered only in sweeps that are declared `alike`: each rank makes them and visits the same pages. Then what is uploaded
when follows from acquire and release, the same everywhere. Two things could tell ranks apart, and neither may:

    a page that is in a free slot by chance (slots.py)    is gathered again all the same
    sweeps that are not alike, between those that are     (evaluations, of which ranks have a different number; flushes,
                                                          in which each visits its own pages; a step without work for
                                                          some) upload all of a page, learn their order apart, and leave
                                                          no trace in `common`

`common` is the list of pages that were gathered past the end of the last alike sweep, on every rank. The next one
begins with them. A rank whose slots were used for something else in between uploads them again by itself, whole.

**One writer.** A shared home changes in a flush that all ranks make together (methods/zo/write_back.py), between two
barriers: before the first, every rank has waited for its GPU, so all gathers of the old bytes are over; after the
second, every writer has waited for its copies. Within alike sweeps shared homes are never committed.

Bytes per page and rank: k over the link, (K - 1) k received; slots are larger by less than K ALIGN bytes.
Tested with gloo: processes on a CPU, two on one GPU. NCCL between several GPUs is untested.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.offload.engine import Engine
from keyhole.offload.slots import Slot, page_bytes
from keyhole.ranks import Ranks

ALIGN = 512  # bytes
PAGES = 4  # that are timed
MARGIN = 0.9  # a gather has to be faster by that: its kernels take a part of the GPU
WAYS = ("auto", "always", "never")


class GatheringEngine(Engine):
    """An engine for ranks that share homes. It uploads all of a page until `decide` has said otherwise."""

    def __init__(
        self, homes: list[torch.Tensor], streamed: set[int], device: torch.device, ranks: Ranks, **options: Any
    ) -> None:
        self.ranks = ranks
        self.gathers = False  # decided: alike sweeps gather
        self.gathering = False  # in an alike sweep, now
        self.common: list[int] = []
        super().__init__(homes, streamed, device, **options)
        ranks.meet_neighbours()
        if self.cuda:
            self.between = torch.cuda.Stream(device)
            self.streams.append(self.between)

    # -- whether ---------------------------------------------------------------------------------------------------

    def decide(self, way: str) -> str:
        """Whether alike sweeps gather; called by all ranks when homes are filled. way: auto or always. Returns what was
        decided, and why."""
        count, plan = self.ranks.local_size, (sorted(self.streamed), sorted(self.shared), self.slot_count)
        parts = f"uploads: each of {count} ranks takes 1/{count} of a unit over its link and gathers the rest"
        whole = f"uploads: each of {count} ranks takes all of a unit over its link"
        if any(other != plan for other in self.ranks.objects(plan)):
            if way == "always":
                raise UserError(
                    "offload.gather: always needs ranks that stream the same units; set gpu_memory, so that all plan "
                    "alike, or offload.gather=auto"
                )
            return f"{whole}: they do not stream the same units"
        if way == "always":
            self.gathers = True
            return f"{parts} (offload.gather=always)"
        pages = sorted(self.shared, key=lambda page: page_bytes(self.homes[page]), reverse=True)[:PAGES]
        everyone = self.ranks.objects(tuple(self._seconds(pages, gathering) for gathering in (False, True)))
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
            self.gathering = gathering
            for page in pages:
                self._upload(page)
                self._drop_ahead()
            self.gathering = False
            self._synchronize()
            seconds = time.perf_counter() - begin_s
        self.invalidate()
        self.bytes_up = counted
        return seconds

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    # -- sweeps ----------------------------------------------------------------------------------------------------

    @contextmanager
    def sweep(self, name: str, guess: list[int], learn: bool = True, alike: bool = False) -> Iterator[None]:
        self.gathering = alike and self.gathers
        try:
            with super().sweep(name if alike else f"{name}, apart", guess, learn, alike):
                yield
        finally:
            if self.gathering:
                self.common = [slot.page for slot in self.ahead if slot.page is not None]
            self.gathering = False

    def _line_up(self) -> None:
        if not self.gathering:
            super()._line_up()
            return
        begin = self.common if self.common == self.order[: len(self.common)] else []
        if [slot.page for slot in self.ahead] != begin:
            self._drop_ahead()
            self.gathering = False
            for page in begin:
                self._upload(page)
            self.gathering = True

    def invalidate(self, everywhere: bool = False) -> None:
        super().invalidate(everywhere)
        if everywhere:
            self.common = []

    # -- one page --------------------------------------------------------------------------------------------------

    def _is_gathered(self, page: int) -> bool:
        return self.gathering and page in self.shared

    def _part_bytes(self, page: int) -> int:
        count = self.ranks.local_size
        return -(-page_bytes(self.homes[page]) // (count * ALIGN)) * ALIGN

    def _room(self, page: int) -> int:
        return self.ranks.local_size * self._part_bytes(page) if page in self.shared else super()._room(page)

    def _crossing_bytes(self, page: int) -> int:
        if not self._is_gathered(page):
            return super()._crossing_bytes(page)
        begin, end = self._own(page)
        return end - begin

    def _own(self, page: int) -> tuple[int, int]:
        """Where this rank's part of a page begins and ends; it may be cut short, or empty."""
        part, size = self._part_bytes(page), page_bytes(self.homes[page])
        return min(self.ranks.local_rank * part, size), min((self.ranks.local_rank + 1) * part, size)

    def _may_reuse(self, page: int) -> bool:
        return super()._may_reuse(page) and not self._is_gathered(page)

    def _last_stream(self, page: int) -> "torch.cuda.Stream":
        return self.between if self._is_gathered(page) else self.up

    def _copy_up(self, page: int, slot: Slot) -> None:
        if not self._is_gathered(page):
            super()._copy_up(page, slot)
            return
        begin, end = self._own(page)
        slot.buffer[begin:end].copy_(self.homes[page].view(torch.uint8)[begin:end], non_blocking=True)
        if self.cuda:
            self.between.wait_stream(self.up)
        with torch.cuda.stream(self.between) if self.cuda else nullcontext():
            self.ranks.gather_on_machine(slot.buffer[: self._room(page)])
