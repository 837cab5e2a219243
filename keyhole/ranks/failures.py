"""An error on one rank ends all of them, and is reported once, with the rank that had it.

A rank that fails writes its error to the store (the first one wins), and closes its connections. Ranks that wait for it
in a collective find the connection closed and read the store:

    an error is stored     RankFailed: the rank, and its own message
    nothing is stored      the rank is dead. On this machine its process id shows which rank; ranks of other machines
                           are identified by the time of their last heartbeat (alive.py)

The leader prints the error. torchrun ends all other processes as soon as one has ended, so a rank that failed waits
until the leader has read its message (`heard`); if the leader does not read it, the rank prints it itself.
"""

import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyhole.errors import UserError

FAILED, HEARD, SAID = "failed", "heard", "said"
POLL_S = 0.05
WRITES_S = 1.0  # time for a failing rank to write to the store, which it does before it closes connections


class RankFailed(UserError):
    """Another rank has failed or died. code: the exit code of this process."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class Failures:
    """What the ranks of one run know about each other's failures."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self.where = {rank: f"{socket.gethostname()}, process {os.getpid()}"}
        self.pids: dict[int, int] = {}  # of ranks on this machine
        self.stale: Callable[[], int | None] = lambda: None  # a rank without heartbeats

    def learn(self, everyone: list[tuple[str, int]]) -> None:
        """everyone: (host, process id) of every rank."""
        here = everyone[self.rank][0]
        self.where = {rank: f"{host}, process {pid}" for rank, (host, pid) in enumerate(everyone)}
        self.pids = {rank: pid for rank, (host, pid) in enumerate(everyone) if host == here}

    def named(self, rank: int) -> str:
        return f"rank {rank} ({self.where[rank]})" if rank in self.where else f"rank {rank}"

    def publish(self, error: BaseException) -> None:
        """Stores the reason why this rank ends, unless another rank was first."""
        with suppress(Exception):  # the store may be gone too
            code, text = told(error)
            self.store.compare_set(FAILED, "", json.dumps({"rank": self.rank, "code": code, "text": text}))

    def read(self) -> RankFailed | None:
        """The failure that another rank has stored."""
        if not self.store.check([FAILED]):
            return None
        found = json.loads(self.store.get(FAILED))
        if found["rank"] == self.rank:
            return None
        self.store.set(f"{HEARD}/{self.rank}", "1")
        return RankFailed(f"{self.named(found['rank'])}: {found['text']}", found["code"])

    def hear(self) -> None:
        """Called by the leader, which reports an error of its own: other ranks that ended too need not report
        theirs."""
        with suppress(Exception):
            self.store.set(f"{HEARD}/{self.rank}", "1")

    def is_first_to_say(self) -> bool:
        """Whether this rank is the one that says why all end, where the leader cannot."""
        try:
            return bool(self.store.compare_set(SAID, "", str(self.rank)).decode() == str(self.rank))
        except Exception:  # the store is gone: better said twice than never
            return True

    def wait_until_heard(self, limit_s: float) -> bool:
        """Whether the leader has read this rank's message in time."""
        end_s = time.monotonic() + limit_s
        with suppress(Exception):
            while time.monotonic() < end_s:
                if self.store.check([f"{HEARD}/0"]):
                    return True
                time.sleep(POLL_S)
        return False

    def found(self, limit_s: float) -> RankFailed:
        """The reason why a connection was closed. limit_s: for ranks of other machines."""
        begin_s = time.monotonic()
        try:
            while time.monotonic() - begin_s < limit_s:
                known = self.read()
                if known is not None:
                    return known
                if time.monotonic() - begin_s > WRITES_S:
                    dead = self._dead()
                    if dead is not None:
                        return self.lost(dead)
                time.sleep(POLL_S)
        except Exception as error:  # the store is gone: torchrun, or its machine, has ended
            return RankFailed(f"torchrun, or the machine of rank 0, cannot be reached any more: {error}", 1)
        return RankFailed("the connection to another rank was lost, and no rank says why", 1)

    def _dead(self) -> int | None:
        gone = [rank for rank, pid in self.pids.items() if rank != self.rank and not is_running(pid)]
        return gone[0] if gone else self.stale()

    def lost(self, rank: int) -> RankFailed:
        return RankFailed(f"{self.named(rank)} has died; the run ends here: go on with --resume", 1)


def told(error: BaseException) -> tuple[int, str]:
    """(exit code, text) of an error: a message for a UserError, a traceback for a bug."""
    if isinstance(error, UserError):
        return getattr(error, "code", 2), str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    return 1, "".join(traceback.format_exception(error))


def is_running(pid: int) -> bool:
    """Whether a process of this machine is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
