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
        self.measured: dict[str, list[Pairs]] = {}  # sweeps that nobody has asked about, oldest first
        self.current: Pairs | None = None

    def begin(self, name: str) -> None:
        """A sweep begins."""
        sweeps = self.measured[name] = [pairs for pairs in self.measured.get(name, []) if pairs]
        self.current = [] if self.enabled and len(sweeps) < AT_ONCE else None
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

    def take(self, name: str) -> float | None:
        """The share of the oldest sweep of this name that nobody has asked about; None if it is not done."""
        sweeps = self.measured.get(name)
        if not sweeps or not _is_done(sweeps[0]):
            return None
        pairs = sweeps.pop(0)
        whole_ms = pairs[0][0].elapsed_time(pairs[-1][1])
        return sum(before.elapsed_time(after) for before, after in pairs) / whole_ms if whole_ms > 0 else 0.0


def _is_done(pairs: Pairs) -> bool:
    return bool(pairs) and pairs[-1][1].query()
