"""A tracker on a thread of its own: training hands an entry over and goes on, however slow the other end is.

The library is imported and the tracker made on that thread too; the start waits for it OPEN_S seconds at most. Entries
wait in a queue (a server may be away for a while; a million of them take some hundred MiB). At the end of a run what is
left gets CLOSE_S seconds. The first error of the tracker ends it: the next `write`, or `close`, raises it, so that it
is said (reports.py), and nothing more is handed over.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keyhole.training.trackers import Tracker

OPEN_S, CLOSE_S = 20.0, 30.0
MOST = 10**6  # entries that wait


class Behind:
    """A tracker by its name. make: imports the library and makes the tracker."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name, self.make = name, make
        self.entries: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST)
        self.error: Exception | None = None
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"keyhole-{name}", daemon=True)
        self.thread.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Hands an entry over; raises what the tracker has raised since the last time."""
        self._raise()
        self.entries.put_nowait(dict(entry))

    def close(self, close_s: float = CLOSE_S) -> None:
        """Waits for what is left."""
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
        except Exception as error:  # of any kind: a library's
            self.error = error
        finally:
            self.ready.set()


def wait_until_open(trackers: Sequence[Behind], open_s: float = OPEN_S) -> None:
    """Returns when all are made, or have failed; after so many seconds in any case."""
    end_s = time.monotonic() + open_s
    for each in trackers:
        each.ready.wait(max(0.0, end_s - time.monotonic()))
