"""Signs of life: no rank waits for a dead one for longer than a limit.

A closed connection is noticed at once (failures.py). What closes none (a machine without power, a process that is
stopped or hangs, a NCCL kernel that waits for a peer that has gone) is found here. A thread of every rank counts up a
number in the store, a few times per limit, and watches that of others:

    the leader watches everybody, the others watch the leader        2 N small messages per beat, at the store

A number that stands still for `limit_s` is a dead rank; so is one that has said that it failed. Then the main thread
gets GRACE_S (the limit, if that is shorter) to come back from the collective that it is in. A collective cannot be
interrupted, so after that the process ends itself, with a word. Nothing is lost by that: what is on disk is complete at
every instant (docs/durability.md). Saves and evaluations may take as long as they like: signs of life go on meanwhile.
A rank that has not begun yet is not missed here: group.py waits for all of them first.

torchrun itself may be killed. Its store goes with it, and nobody would end the ranks any more; they find another
process to be their parent (`orphaned`), and stop as after a signal: the step is finished, and saved (crew.py).
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from keyhole.ranks.failures import FAILED, Failures, RankFailed

GRACE_S = 5.0
MOST_BEAT_S = 5.0


class Alive:
    """The thread of one rank. connect: makes a connection to the store, which no other thread uses."""

    def __init__(self, connect: Callable[[], Any], failures: Failures, watched: Iterable[int], limit_s: float) -> None:
        self.connect, self.failures, self.watched, self.limit_s = connect, failures, list(watched), limit_s
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun, which starts us
        self.orphaned = False
        self.always = False  # the main thread may wait for others at any time (a GPU does it for it)
        self.waiting_since: float | None = None  # the main thread is in a collective
        self.seen: dict[int, tuple[bytes, float]] = {}  # rank -> its number, and when it changed
        self.trouble: RankFailed | None = None
        self.trouble_since = 0.0
        self.closing, self.wake = False, threading.Event()
        failures.stale = self.stale
        self.thread = threading.Thread(target=self._run, name="keyhole-alive", daemon=True)
        self.thread.start()

    def stale(self) -> int | None:
        """A rank that has given no sign of life for the limit."""
        now = time.monotonic()
        return next((rank for rank, (_, at) in self.seen.items() if now - at > self.limit_s), None)

    def set_limit(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.wake.set()

    def close(self) -> None:
        self.closing = True
        self.wake.set()
        self.thread.join(timeout=1.0)

    def _run(self) -> None:
        beats, store = 0, None
        own = f"alive/{self.failures.rank}"
        reached_s = time.monotonic()
        while not self.closing:
            beats += 1
            self.orphaned = self.parent is not None and os.getppid() != self.parent
            if self.orphaned and (store is None or os.environ.get("GROUP_RANK") == "0"):
                break  # it took its store along, which is on the first machine
            try:
                store = store or self.connect()
                store.set(own, str(beats))
                self._look(store)
                reached_s = time.monotonic()
            except Exception as error:  # torchrun's store is gone, or is about to be
                store = None
                if time.monotonic() - reached_s > self.limit_s and self.trouble is None:
                    self._note(RankFailed(f"torchrun, or the machine of rank 0, cannot be reached any more: {error}"))
            self._act()
            self.wake.wait(min(MOST_BEAT_S, self.limit_s / 6))
            self.wake.clear()

    def _look(self, store: Any) -> None:
        now = time.monotonic()
        for rank in self.watched:
            key = f"alive/{rank}"
            if not store.check([key]):
                continue
            number = store.get(key)
            if self.seen.get(rank, (None, 0.0))[0] != number:
                self.seen[rank] = (number, now)
        if self.trouble is None and (dead := self.stale()) is not None:
            named = self.failures.named(dead)
            self._note(RankFailed(f"{named} has given no sign of life for {self.limit_s:g} s (rank_timeout)", 1))
        if self.trouble is None and store.check([FAILED]):
            self._note(RankFailed("another rank has failed", 1))

    def _note(self, trouble: RankFailed) -> None:
        self.trouble, self.trouble_since = trouble, time.monotonic()

    def _act(self) -> None:
        if self.trouble is None:
            return
        now = time.monotonic()
        began = self.trouble_since if self.always else self.waiting_since
        if began is not None and now - max(began, self.trouble_since) > min(GRACE_S, self.limit_s):
            end(f"keyhole: {self.trouble}; the run ends here: go on with --resume\n")


def end(text: str) -> None:
    """Ends the process from any thread, with a word."""
    os.write(2, text.encode(errors="backslashreplace"))
    os._exit(1)
