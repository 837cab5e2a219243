"""Where the time of a step goes, measured while it runs, without waits.

A step is counted from the beginning of one backward pass to the beginning of the next, because an update on the host
may take that long without a stall:

    forward, reverse           the device's kernels, including waits
    down, up                   copies of gradients and of steps, on their streams
    update                     the host's arithmetic
    exposed down/update/up     how long the kernels were stalled by each of them

A stall at a unit is measured on the device: it begins when the kernels before have run and ends when the unit's step
has been uploaded. The last part of it, as long as the upload, counts as `up`; the rest counts for the host.

Times on a GPU are pairs of events, read a step later when they have fired; on a CPU, which runs everything
sequentially, they are clock readings.
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
        """A context around work that is enqueued on the current stream, or done. Yields the event of its beginning."""
        begin, begin_s = self.mark(), time.perf_counter()
        yield begin
        if self.cuda:
            self._now.append((name, begin, self.mark()))
        else:
            self.add(name, time.perf_counter() - begin_s)

    def mark(self) -> Event:
        """An event recorded now on the current stream; None on a CPU."""
        if not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, seconds: float) -> None:
        """Adds a time measured by the clock; from any thread."""
        self._now.append((name, seconds))

    def stalled(self, begin: Event, started: Event) -> None:
        """The current stream has waited since `begin`, finally for a copy that began at `started`."""
        self._now.append(("stall", begin, started, self.mark()))

    def turn(self) -> None:
        """A backward pass begins: what was measured since the last one is a step."""
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
        """Mean seconds of a span of this name in that step; 0 if there was none."""
        return self.sums.get(name, 0.0) / self.counts.get(name, 1)


def _seconds(span: tuple[Any, ...]) -> list[tuple[str, float]]:
    if len(span) == 2:
        return [span]
    if span[0] != "stall":
        return [(span[0], span[1].elapsed_time(span[2]) / 1e3)]
    begin, started, end = span[1:]
    whole, copy = begin.elapsed_time(end) / 1e3, started.elapsed_time(end) / 1e3
    return [("exposed up", min(whole, copy)), ("exposed update", max(0.0, whole - copy))]
