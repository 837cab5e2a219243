"""How much of a sweep the GPU waited for pages.

The compute stream waits for an upload (engine.py): a timing event before the wait and one after it tell for how long,

    share = sum of (after - before) / (last after - first before)

without holding anybody up: events are read when the GPU has passed them, at the beginning of some later sweep. The
host may be several sweeps ahead; no more than AT_ONCE are measured at a time. Two events a page, in the FIRST sweeps
and in every NTH after that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

AT_ONCE = 3
FIRST, NTH = 4, 8


class Stalls:
    """Waits of the sweeps of one name; of none, by default."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.sweeps: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []  # not taken yet, oldest first
        self.measures, self.count = False, 0

    def begin(self, name: str) -> None:
        """A sweep begins."""
        self.sweeps = [pairs for pairs in self.sweeps if pairs]
        due = name == self.name and (self.count < FIRST or self.count % NTH == 0)
        self.measures = due and len(self.sweeps) < AT_ONCE
        self.count += name == self.name
        if self.measures:
            self.sweeps.append([])

    @contextmanager
    def wait(self, stream: "torch.cuda.Stream") -> Iterator[None]:
        """Around the enqueueing of a wait."""
        if not self.measures:
            yield
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        yield
        after.record(stream)
        self.sweeps[-1].append((before, after))

    def take(self) -> float | None:
        """The share of the oldest sweep that has not been taken; None if it is not done."""
        if not self.sweeps or not self.sweeps[0] or not self.sweeps[0][-1][1].query():
            return None
        pairs = self.sweeps.pop(0)
        whole_ms = pairs[0][0].elapsed_time(pairs[-1][1])
        return sum(before.elapsed_time(after) for before, after in pairs) / whole_ms if whole_ms > 0 else 0.0
