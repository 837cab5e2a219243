"""Where the time of a step goes, measured as it runs, without a wait.

A step is counted from the beginning of one reverse to the beginning of the next, because that is how long an update on
the host may take without anybody waiting:

    forward, reverse           the device's kernels, waits included
    down, up                   copies of gradients and of steps, on their streams
    update                     the host's arithmetic
    exposed down/update/up     how long the kernels stood still for each of them

A stall at a unit is seen by the device: it begins when the kernels before have run and ends when the unit's step is up.
As much of it as the copy up took is the copy's, what came before is the host's.

Times on a GPU are pairs of events, read a step later when they have happened; on a CPU, where everything is done in
turn, they are the clock's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Event = Any


class Timing:
    """Seconds of the parts of a step, by name."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._now: list[tuple[Any, ...]] = []
        self._last: list[tuple[Any, ...]] = []

    @contextmanager
    def of(self, name: str) -> Iterator[Event]:
        """Around work that is queued on the current stream, or done. Gives the event of its beginning."""
        begin, begin_s = self.mark(), time.perf_counter()
        yield begin
        if self.cuda:
            self._now.append((name, begin, self.mark()))
        else:
            self.add(name, time.perf_counter() - begin_s)

    def mark(self) -> Event:
        """Now, on the current stream; None on a CPU."""
        if not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, seconds: float) -> None:
        """Something that was measured by the clock; from any thread."""
        self._now.append((name, seconds))

    def stalled(self, begin: Event, started: Event) -> None:
        """The current stream has waited since `begin`, at last for a copy that `started` then."""
        self._now.append(("stall", begin, started, self.mark()))

    def turn(self) -> None:
        """A reverse begins: what was measured since the last one is a step."""
        self.read()
        self._now, self._last = [], self._now

    def read(self) -> dict[str, float]:
        """Seconds of the last whole step by name, as far as they are known without waiting."""
        last = self._last
        if last and all(not self.cuda or len(span) == 2 or span[-1].query() for span in last):
            self._last, self.sums, self.counts = [], {}, {}
            for span in last:
                for name, seconds in _seconds(span):
                    self.sums[name] = self.sums.get(name, 0.0) + seconds
                    self.counts[name] = self.counts.get(name, 0) + 1
        return self.sums

    def mean(self, name: str) -> float:
        """Of one span of this name in that step; 0 where there was none."""
        return self.sums.get(name, 0.0) / self.counts.get(name, 1)


def _seconds(span: tuple[Any, ...]) -> list[tuple[str, float]]:
    if len(span) == 2:
        return [span]
    if span[0] != "stall":
        return [(span[0], span[1].elapsed_time(span[2]) / 1e3)]
    begin, started, end = span[1:]
    whole, copy = begin.elapsed_time(end) / 1e3, started.elapsed_time(end) / 1e3
    return [("exposed up", min(whole, copy)), ("exposed update", max(0.0, whole - copy))]
