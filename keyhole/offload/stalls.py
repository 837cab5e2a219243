"""The share of a sweep that the GPU spent waiting for pages. The compute stream waits for uploads (engine.py). Two
timing events, before and after each wait, measure its length:

    share = sum of (after - before) / (last after - first before)

Measuring adds no wait: the host reads events after the GPU has passed them, at the beginning of a later sweep. The host
may be several sweeps ahead; at most AT_ONCE sweeps are measured at a time. Cost: two events per page, in the FIRST
sweeps and in every NTH sweep after that.
"""

from contextlib import nullcontext

from keyhole.machine.gpu import accelerator

NOTHING = nullcontext()
AT_ONCE = 3
FIRST, NTH = 4, 8


class Stalls:
    """Measures the waits in sweeps of this name; None: measures nothing."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.sweeps: list[list[accelerator.Event]] = []  # before and after every wait; not read yet, oldest first
        self.measures, self.count = False, 0

    def begin(self, name: str) -> None:
        """Called at the beginning of every sweep: decides whether this one is measured."""
        self.sweeps = [events for events in self.sweeps if events]
        due = name == self.name and (self.count < FIRST or self.count % NTH == 0)
        self.measures = due and len(self.sweeps) < AT_ONCE
        self.count += name == self.name
        if self.measures:
            self.sweeps.append([])

    def mark(self, stream: "accelerator.Stream") -> None:
        """Called before and after a wait is enqueued on the stream."""
        if self.measures:
            event = accelerator.Event(enable_timing=True)
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
