"""An error on one rank ends all of them, and is reported once, with the rank that had it; a dead rank ends them too.

A rank that fails writes its error to the store (the first one wins), and closes its connections. Ranks that wait for it
in a collective find the connection closed and read the store:

    an error is stored     RankFailed: the rank, and its own message
    nothing is stored      the rank is dead. On this machine its process id shows which rank; ranks of other machines
                           are known by their silence

The leader prints the error. torchrun ends all other processes as soon as one has ended, so a rank that failed waits
until the leader has read its message; if the leader does not read it, the rank prints it itself.

Heartbeats detect what closes no connection: a machine without power, a process that is stopped or hangs, a NCCL kernel
that waits for a peer that is gone. A thread of every rank increments a counter in the store, a few times per limit, and
watches the counters of others:

    the leader watches all ranks, the others watch the leader        2 N small messages per beat, at the store

A rank whose counter does not change for `limit_s` is dead; so is one that has reported a failure. The main thread then
has GRACE_S (the limit, if that is shorter) to return from its current collective. A collective cannot be interrupted,
so after that the process prints a message and ends itself. Nothing is lost: the files on disk are complete at every
instant (docs/durability.md). Saves and evaluations may take any time, because heartbeats continue meanwhile. A rank
that has not started yet is not counted as dead here: group.py waits for all ranks first.

torchrun itself may be killed. Its store ends with it, and nothing would end the ranks any more. They notice that their
parent process is another one (`orphaned`), and stop as after a signal: the step is finished and saved.
"""

import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyhole.errors import UserError

FAILED, HEARD = "failed", "heard"
POLL_S = 0.05
WRITES_S = 1.0  # time for a failing rank to write to the store, which it does before it closes connections
GRACE_S = 5.0
MOST_BEAT_S = 5.0


class RankFailed(UserError):
    """Another rank has failed or died. code: the exit code of this process."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class Failures:
    """What this rank knows about the failures of others. connect: opens a connection to the store; each thread has its
    own."""

    def __init__(self, connect: Callable[[], Any], rank: int, size: int, limit_s: float) -> None:
        self.connect, self.rank, self.limit_s = connect, rank, limit_s
        self.store = connect()
        self.where = {rank: f"{socket.gethostname()}, process {os.getpid()}"}
        self.pids: dict[int, int] = {}  # of ranks on this machine
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun, which started this rank
        self.orphaned = False
        self.always = False  # True: the main thread may wait for others at any time (through its GPU)
        self.waiting_since: float | None = None  # set while the main thread is in a collective
        self.watched = range(1, size) if rank == 0 else [0]
        self.counters: dict[int, tuple[bytes, float]] = {}  # rank -> its counter, and when it changed
        self.trouble, self.trouble_since = "", 0.0
        self.closing, self.wake = False, threading.Event()
        self.thread = threading.Thread(target=self._beat, name="keyhole-alive", daemon=True)
        self.thread.start()

    def learn(self, everyone: list[tuple[str, int]]) -> None:
        """everyone: (host, process id) of every rank."""
        here = everyone[self.rank][0]
        self.where = {rank: f"{host}, process {pid}" for rank, (host, pid) in enumerate(everyone)}
        self.pids = {rank: pid for rank, (host, pid) in enumerate(everyone) if host == here}

    def named(self, rank: int) -> str:
        return f"rank {rank} ({self.where[rank]})" if rank in self.where else f"rank {rank}"

    # -- errors ----------------------------------------------------------------------------------------------------

    def publish(self, error: BaseException) -> int | None:
        """Stores the reason why this rank ends. Returns None if it is the first, else the exit code of the first."""
        code, text = told(error)
        own = json.dumps({"rank": self.rank, "code": code, "text": text})
        try:
            stored = self.store.compare_set(FAILED, "", own).decode()
        except Exception:  # the store is gone: better said twice than never
            return None
        return None if stored == own else int(json.loads(stored)["code"])

    def read(self) -> RankFailed | None:
        """The failure that another rank has stored; the leader, which reads it, reports it."""
        if not self.store.check([FAILED]):
            return None
        found = json.loads(self.store.get(FAILED))
        if self.rank == 0:
            self.store.set(HEARD, "1")
        return (
            None
            if found["rank"] == self.rank
            else RankFailed(f"{self.named(found['rank'])}: {found['text']}", found["code"])
        )

    def heard(self) -> bool:
        """Whether the leader has read this rank's message in time."""
        end_s = time.monotonic() + self.limit_s
        with suppress(Exception):
            while time.monotonic() < end_s:
                alone = 0 in self._dead()
                if self.store.check([HEARD]):
                    return True
                if alone:
                    break
                time.sleep(POLL_S)
        return False

    def found(self) -> RankFailed:
        """The reason why a connection was closed."""
        begin_s = time.monotonic()
        try:
            while (waited_s := time.monotonic() - begin_s) < self.limit_s:
                if (known := self.read()) is not None:
                    return known
                if waited_s > WRITES_S and (dead := self._dead()):
                    return RankFailed(f"{self.named(dead[0])} has died; the run ends here: go on with --resume", 1)
                time.sleep(POLL_S)
        except Exception as error:  # the store is gone: torchrun, or its machine, has ended
            return RankFailed(_unreachable(error), 1)
        return RankFailed("the connection to another rank was lost, and no rank says why", 1)

    def _dead(self) -> list[int]:
        gone = [rank for rank, pid in self.pids.items() if rank != self.rank and not is_running(pid)]
        return gone or self._silent()

    # -- heartbeats ------------------------------------------------------------------------------------------------

    def set_limit(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.wake.set()

    def close(self) -> None:
        self.closing = True
        self.wake.set()
        self.thread.join(timeout=1.0)

    def _silent(self) -> list[int]:
        """The ranks without a heartbeat within the limit."""
        return [rank for rank, (_, at) in self.counters.items() if time.monotonic() - at > self.limit_s]

    def _beat(self) -> None:
        beats, store = 0, None
        reached_s = time.monotonic()
        while not self.closing:
            beats += 1
            self.orphaned = self.parent is not None and os.getppid() != self.parent
            if self.orphaned and (store is None or os.environ.get("GROUP_RANK") == "0"):
                break  # it took its store along, which is on the first machine
            trouble = ""
            try:
                store = store or self.connect()
                store.set(f"alive/{self.rank}", str(beats))
                trouble = self._listen(store)
                reached_s = time.monotonic()
            except Exception as error:  # torchrun's store is gone, or about to be
                store = None
                if time.monotonic() - reached_s > self.limit_s:
                    trouble = _unreachable(error)
            now = time.monotonic()
            if trouble and not self.trouble:
                self.trouble, self.trouble_since = trouble, now
            began = self.trouble_since if self.always else self.waiting_since
            if self.trouble and began is not None:
                if now - max(began, self.trouble_since) > min(GRACE_S, self.limit_s):
                    end(f"keyhole: {self.trouble}; the run ends here: go on with --resume\n")
            self.wake.wait(min(MOST_BEAT_S, self.limit_s / 6))
            self.wake.clear()

    def _listen(self, store: Any) -> str:
        """What is wrong with the others; "" if nothing is."""
        for rank in self.watched:
            if store.check([key := f"alive/{rank}"]):
                counter = store.get(key)
                if self.counters.get(rank, (None, 0.0))[0] != counter:
                    self.counters[rank] = (counter, time.monotonic())
        if silent := self._silent():
            return f"{self.named(silent[0])} has given no sign of life for {self.limit_s:g} s (rank_timeout)"
        return "another rank has failed" if store.check([FAILED]) else ""


def _unreachable(error: Exception) -> str:
    return f"torchrun, or the machine of rank 0, cannot be reached any more: {error}"


def told(error: BaseException) -> tuple[int, str]:
    """(exit code, text) of an error: a message for a UserError, a traceback for a bug."""
    if isinstance(error, UserError):
        return error.code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    return 1, "".join(traceback.format_exception(error))


def is_running(pid: int) -> bool:
    """Whether a process of this machine is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end(text: str) -> None:
    os.write(2, text.encode(errors="backslashreplace"))
    os._exit(1)
