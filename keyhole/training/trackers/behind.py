"""Runs a tracker in a separate thread: training passes an entry on and continues, however slow the tracker is.

The library is imported and the tracker is created in that thread too; the start waits for it OPEN_S seconds at most.
Entries wait in a queue (a server may be away for a while; a million of them take some hundred MiB). At the end of a run
the tracker has CLOSE_S seconds for the remaining entries. The first error ends the tracker: the next `write`, or
`close`, raises it, so that it is reported (training/reports.py), and no more entries are passed on.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keyhole.training.trackers import Tracker

OPEN_S, CLOSE_S = 20.0, 30.0
MOST = 10**6  # entries in the queue


class Behind:
    """A tracker in its thread. make: imports the library and creates the tracker."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name, self.make = name, make
        self.entries: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST)
        self.error: Exception | None = None
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"keyhole-{name}", daemon=True)
        self.thread.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Queues an entry; raises the tracker's error, if there was one since the last call."""
        self._raise()
        self.entries.put_nowait(dict(entry))

    def close(self, close_s: float = CLOSE_S) -> None:
        """Waits for the remaining entries."""
        self.entries.put(None)
        self.thread.join(close_s)
        self._raise()
        if self.thread.is_alive():
            raise TimeoutError(f"{self.entries.qsize():,} entries are not sent after {close_s:.0f} s")

    def _raise(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        try:
            tracker = self.make()
            self.ready.set()
            try:
                while (entry := self.entries.get()) is not None:
                    tracker.write(entry)
            finally:
                tracker.close()
        except Exception as error:  # libraries raise errors of any kind
            self.error = error
        finally:
            self.ready.set()


def wait_until_open(trackers: Sequence[Behind], open_s: float = OPEN_S) -> None:
    """Returns when all trackers are created or have failed, and after open_s seconds in any case."""
    end_s = time.monotonic() + open_s
    for each in trackers:
        each.ready.wait(max(0.0, end_s - time.monotonic()))
