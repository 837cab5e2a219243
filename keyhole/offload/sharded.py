"""Pages of which every rank stores 1 / N, at the price of one collective per visit.

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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

import torch

from keyhole.offload.engine import Engine, EngineOptions
from keyhole.offload.slots import Slot
from keyhole.ranks import Ranks

PART = 64  # elements of a shard


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
    def sweep(self, name: str, order: list[int]) -> Iterator[None]:
        self.rewritten.clear()
        with super().sweep(name, order):
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
