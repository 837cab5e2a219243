"""How much of a sweep the GPU waited for pages.

The compute stream waits for an upload (engine.py): a timing event before the wait and one after it tell for how long,

    share = sum of (after - before) / (last after - first before)

without holding anybody up: events are read when the GPU has passed them, at the beginning of some later sweep. The
host may be several sweeps ahead; no more than AT_ONCE are measured at a time. Two events a page.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

AT_ONCE = 3

Pairs = list[tuple[torch.cuda.Event, torch.cuda.Event]]


class Stalls:
    """Waits of sweeps, by the sweep's name, while somebody wants to know (`enabled`)."""

    def __init__(self) -> None:
        self.enabled = False
        self.measured: dict[str, list[Pairs]] = {}  # of the newest that is done, and those that are not; oldest first
        self.current: Pairs | None = None

    def begin(self, name: str) -> None:
        """A sweep begins."""
        sweeps = self._known(name)
        self.current = [] if self.enabled and len(sweeps) <= AT_ONCE else None
        if self.current is not None:
            sweeps.append(self.current)

    @contextmanager
    def wait(self, stream: "torch.cuda.Stream") -> Iterator[None]:
        """Around the enqueueing of a wait."""
        if self.current is None:
            yield
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        yield
        after.record(stream)
        self.current.append((before, after))

    def share(self, name: str) -> float | None:
        """Of the newest sweep of this name that is done; None if none is."""
        sweeps = self._known(name)
        if not sweeps or not _is_done(sweeps[0]):
            return None
        pairs = sweeps[0]
        whole_ms = pairs[0][0].elapsed_time(pairs[-1][1])
        return sum(before.elapsed_time(after) for before, after in pairs) / whole_ms if whole_ms > 0 else 0.0

    def _known(self, name: str) -> list[Pairs]:
        """Sweeps from the newest that is done."""
        sweeps = self.measured.setdefault(name, [])
        while len(sweeps) > 1 and _is_done(sweeps[1]):
            sweeps.pop(0)
        return sweeps


def _is_done(pairs: Pairs) -> bool:
    return bool(pairs) and pairs[-1][1].query()
