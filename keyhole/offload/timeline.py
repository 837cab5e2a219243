"""When uploads, kernels and write-backs ran: spans in lanes, for the chart of a run's page.

A span is a pair of times. On a GPU these are timing events recorded on the stream where the work is enqueued, so
measuring adds no wait; on a CPU, which runs everything sequentially, they are clock readings. The engine fills three
lanes: `upload` and `write-back` hold its copies; `compute` holds the work of the caller's stream from the arrival of a
page until the next acquire or the end of the sweep. A gap in `compute` is a wait for an upload. The lane `gradients`
holds the methods' other D2H copies (downlink.py). A step that is replayed as one CUDA graph has no spans.

`Stalls` measures the share of a sweep that the GPU spent waiting for pages. The compute stream waits for uploads
(engine.py). Two timing events, before and after each wait, measure its length:

    share = sum of (after - before) / (last after - first before)

Measuring adds no wait: the host reads events after the GPU has passed them, at the beginning of a later sweep. The host
may be several sweeps ahead; at most AT_ONCE sweeps are measured at a time. Cost: two events per page, in the FIRST
sweeps and in every NTH sweep after that.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

NOTHING = nullcontext()
AT_ONCE = 3
FIRST, NTH = 4, 8


class Timeline:
    """Collects spans (lane, label, begin, end) while enabled. cuda: times are CUDA events, else clock readings."""

    def __init__(self, enabled: bool = True, cuda: bool = True) -> None:
        self.enabled, self.cuda = enabled, cuda
        self.spans: list[tuple[str, str, Any, Any]] = []
        self.running: tuple[str, Any] | None = None  # label and begin of the work on the current page
        if enabled:
            self.origin = self.last = self._moment()

    @property
    def measures(self) -> bool:
        """Whether times can be recorded now: not during CUDA graph capture, when nothing runs."""
        return self.enabled and not (self.cuda and torch.cuda.is_current_stream_capturing())

    def _moment(self, stream: torch.cuda.Stream | None = None) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def span(self, lane: str, label: str) -> AbstractContextManager[None]:
        """Measures the work that is enqueued within the context, on the current stream."""
        return self._span(lane, label) if self.enabled else NOTHING

    @contextmanager
    def _span(self, lane: str, label: str) -> Iterator[None]:
        if not self.measures:
            yield
            return
        paused = None if self.cuda or self.running is None else self.running[0]  # a CPU runs one thing at a time
        if paused is not None:
            self.left()
        begin = self._moment()
        yield
        self.spans.append((lane, label, begin, self._moment()))
        if paused is not None:
            self.arrived(paused)

    def arrived(self, label: str, stream: torch.cuda.Stream | None = None) -> None:
        """A page has arrived: the stream's work from now on belongs to it."""
        if self.measures:
            self.left(stream)
            self.running = label, self._moment(stream)

    def left(self, stream: torch.cuda.Stream | None = None) -> None:
        """Ends this work: the next page is acquired, or the sweep is over."""
        if self.measures and self.running is not None:
            (label, begin), self.running = self.running, None
            self.spans.append(("compute", label, begin, self._moment(stream)))

    def stop(self) -> None:
        """Ends the recording; the spans can then be read."""
        if self.enabled:
            self.left()
            self.last, self.enabled = self._moment(), False

    def is_done(self) -> bool:
        """Whether the device has finished all spans; never waits."""
        return not self.cuda or all(event.query() for _, _, _, event in self.spans)

    def rows(self) -> list[tuple[str, str, float, float]]:
        """(lane, label, start_ms, duration_ms) of every span. Waits for the device."""
        if not self.is_done():
            torch.cuda.synchronize()
        return [
            (lane, label, self._ms(self.origin, begin), self._ms(begin, end)) for lane, label, begin, end in self.spans
        ]

    def _ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if self.cuda else 1e3 * (end - begin)


class Stalls:
    """Measures the waits in sweeps of this name; None: measures nothing."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.sweeps: list[list[torch.cuda.Event]] = []  # before and after every wait; not read yet, oldest first
        self.measures, self.count = False, 0

    def begin(self, name: str) -> None:
        """Called at the beginning of every sweep: decides whether this one is measured."""
        self.sweeps = [events for events in self.sweeps if events]
        due = name == self.name and (self.count < FIRST or self.count % NTH == 0)
        self.measures = due and len(self.sweeps) < AT_ONCE
        self.count += name == self.name
        if self.measures:
            self.sweeps.append([])

    def mark(self, stream: "torch.cuda.Stream") -> None:
        """Called before and after a wait is enqueued on the stream."""
        if self.measures:
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            self.sweeps[-1].append(event)

    def take(self) -> float | None:
        """The share of the oldest sweep that has not been read; None while the GPU has not finished it."""
        if not self.sweeps or not self.sweeps[0] or not self.sweeps[0][-1].query():
            return None
        events = self.sweeps.pop(0)
        sweep_ms = events[0].elapsed_time(events[-1])
        waits_ms = sum(before.elapsed_time(after) for before, after in zip(events[::2], events[1::2], strict=True))
        return waits_ms / sweep_ms if sweep_ms > 0 else 0.0
