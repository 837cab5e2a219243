"""Heartbeats: no rank waits for a dead one for longer than a limit.

A closed connection is noticed at once (failures.py). This file detects failures that close no connection: a machine
without power, a process that is stopped or hangs, a NCCL kernel that waits for a peer that is gone. A thread of every
rank increments a counter in the store, a few times per limit, and watches the counters of others:

    the leader watches all ranks, the others watch the leader        2 N small messages per beat, at the store

A rank whose counter does not change for `limit_s` is dead; so is one that has reported a failure. The main thread then
has GRACE_S (the limit, if that is shorter) to return from its current collective. A collective cannot be interrupted,
so after that the process prints a message and ends itself. Nothing is lost: the files on disk are complete at every
instant (docs/durability.md). Saves and evaluations may take any time, because heartbeats continue meanwhile. A rank
that has not started yet is not counted as dead here: group.py waits for all ranks first.

torchrun itself may be killed. Its store ends with it, and nothing would end the ranks any more. They notice that their
parent process is another one (`orphaned`), and stop as after a signal: the step is finished and saved.
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
    """The heartbeat thread of one rank. connect: opens a connection to the store that no other thread uses."""

    def __init__(self, connect: Callable[[], Any], failures: Failures, watched: Iterable[int], limit_s: float) -> None:
        self.connect, self.failures, self.watched, self.limit_s = connect, failures, list(watched), limit_s
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun, which started this rank
        self.orphaned = False
        self.always = False  # True: the main thread may wait for others at any time (through its GPU)
        self.waiting_since: float | None = None  # set while the main thread is in a collective
        self.seen: dict[int, tuple[bytes, float]] = {}  # rank -> its counter, and when it changed
        self.trouble: RankFailed | None = None
        self.trouble_since = 0.0
        self.closing, self.wake = False, threading.Event()
        failures.stale = self.stale
        self.thread = threading.Thread(target=self._run, name="keyhole-alive", daemon=True)
        self.thread.start()

    def stale(self) -> int | None:
        """A rank without a heartbeat within the limit."""
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
            except Exception as error:  # torchrun's store is gone, or about to be
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
    """Prints a message and ends the process, from any thread."""
    os.write(2, text.encode(errors="backslashreplace"))
    os._exit(1)
