"""Host work beside the thread that launches kernels: jobs in, pages ready, errors out.

    pool.submit(job, page=7, after=event, urgency=7)     returns at once
    pool.ready(7)                                        has every job of page 7 been done? never waits
    pool.wait(7)                                         returns when it has

One thread works the jobs off, and torch's own threads do the arithmetic inside a job. (A Python thread for every core
would ask for the GIL thousands of times a second, and the launching thread would queue among them; one worker asks
some three times a chunk of a million elements.) torch's number of threads belongs to the thread that sets it: the
worker's does not change the caller's.

Which job is next? Of those whose CUDA event has happened, the one with the lowest `urgency` (give the position at
which its page is needed next, and the work that holds up the next forward pass first is done first); when none has
happened, the oldest, and the worker waits for its event; the caller's thread never does.

A second thread (helper=True) takes jobs that can be done another way as well, on the device: `aside()` begins one and
returns what waits for its end. The helper begins the next before it waits, so that the device is never without work.
Whichever thread is free takes what is most urgent, and nobody has to know how fast the two are.

The first job that fails ends the work: jobs that wait are dropped, the threads end, and the caller gets WorkerFailed
with the cause at its next submit, ready, wait or drain. Nobody hangs.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from keyhole.machine.host import cpu_count

Job = Callable[[], None]
Aside = Callable[[], Job]  # begins a job elsewhere, returns what waits for its end


class WorkerFailed(RuntimeError):
    """A job on the host raised; its cause is the job's exception."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """A job that was taken."""

    job: Job
    page: Any
    after: Any  # a CUDA event, or None
    urgency: int
    aside: Aside | None

    def may_start(self) -> bool:
        return self.after is None or self.after.query()


def default_threads(launches_all_the_time: bool = False) -> int:
    """All cores but one; three of four where the GPU does not wait for this work, so that kernels are launched beside
    it all the time (by our thread and by autograd's): a team that shares a core with one of these waits for its slowest
    member, and makes launches wait."""
    return max(1, 3 * cpu_count() // 4 if launches_all_the_time else cpu_count() - 1)


class Workers:
    """See the top of this file. threads: torch's threads inside a job; None: default_threads(), one less beside a
    helper."""

    def __init__(self, threads: int | None = None, helper: bool = False) -> None:
        self.threads = threads or max(1, default_threads() - helper)
        self._state = _State()
        self._threads = [threading.Thread(target=_work, args=(self._state, self.threads), name="keyhole-host")]
        if helper:
            self._threads.append(threading.Thread(target=_help, args=(self._state,), name="keyhole-helper"))
        before = torch.get_num_threads()
        for thread in self._threads:
            thread.daemon = True
            thread.start()
            self._state.started.acquire()
        torch.set_num_threads(before)  # what threads that begin later start with
        self._end = weakref.finalize(self, _close, self._state, self._threads)

    def submit(
        self, job: Job, page: Any = None, after: Any = None, urgency: int = 0, aside: Aside | None = None
    ) -> Ticket:
        """Takes a job. after: a CUDA event that must have happened before it starts. aside: the same job for the
        helper."""
        ticket = Ticket(job, page, after, urgency, aside)
        with self._state.changed:
            self._state.check()
            self._state.waiting.append(ticket)
            self._state.pending[page] += 1
            self._state.changed.notify_all()
        return ticket

    def ready(self, page: Any) -> bool:
        """Whether no job of this page is left."""
        with self._state.changed:
            self._state.check()
            return self._state.pending[page] == 0

    def wait(self, page: Any) -> None:
        """Returns when no job of this page is left."""
        self._wait_until(lambda: self._state.pending[page] == 0)

    def drain(self) -> None:
        """Returns when no job at all is left."""
        self._wait_until(lambda: self._state.pending.total() == 0)

    def close(self) -> None:
        """Drops the jobs that have not begun and ends the threads. Safe to call again."""
        self._end()

    def _wait_until(self, done: Callable[[], bool]) -> None:
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.error is not None or self._state.closed or done())
            self._state.check()


class _State:
    """What the threads and the callers share, under one lock. (Apart from Workers, which the threads must not hold.)"""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.started = threading.Semaphore(0)
        self.waiting: list[Ticket] = []
        self.pending: Counter = Counter()  # page -> jobs not done
        self.error: BaseException | None = None
        self.closed = False

    def check(self) -> None:
        if self.error is not None:
            what = f"{type(self.error).__name__}: {self.error}"
            raise WorkerFailed(f"work on the host failed, the run cannot go on: {what}") from self.error
        assert not self.closed, "the workers were closed"

    def take(self, aside: bool = False, wait: bool = True) -> Ticket | None:
        """The job to do next, when there is one; None: the end, or without `wait` none at present that may start."""
        with self.changed:
            mine = [] if self.closed else self._mine(aside)
            while wait and not mine and not self.closed:
                self.changed.wait()
                mine = self._mine(aside)
            able = [ticket for ticket in mine if ticket.may_start()]
            if self.closed or not (able or wait):
                return None
            ticket = min(able, key=lambda t: t.urgency) if able else mine[0]
            self.waiting.remove(ticket)
            return ticket

    def _mine(self, aside: bool) -> list[Ticket]:
        return [ticket for ticket in self.waiting if ticket.aside is not None] if aside else self.waiting

    def finish(self, ticket: Ticket) -> None:
        with self.changed:
            self.pending[ticket.page] -= 1
            self.changed.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        with self.changed:
            self.error = self.error or error
            self.closed = True
            self.waiting.clear()
            self.changed.notify_all()


def _work(state: _State, threads: int) -> None:
    torch.get_num_threads()  # a thread's first question is answered with the process's number, which then stays
    torch.set_num_threads(threads)
    state.started.release()
    try:
        while (ticket := state.take()) is not None:
            if ticket.after is not None:
                ticket.after.synchronize()
            with torch.no_grad():
                ticket.job()
            state.finish(ticket)
    except BaseException as error:  # whatever it was, the caller must learn of it
        state.stop(error)


def _help(state: _State) -> None:
    """Like _work, by `aside`, and one job ahead: the last one begun is waited for when the next has begun."""
    torch.get_num_threads()
    torch.set_num_threads(1)
    state.started.release()
    begun: tuple[Ticket, Job] | None = None
    try:
        while (ticket := state.take(aside=True, wait=begun is None)) is not None or begun is not None:
            last, begun = begun, None
            try:
                if ticket is not None:
                    if ticket.after is not None:
                        ticket.after.synchronize()
                    with torch.no_grad():
                        begun = ticket, ticket.aside()
            finally:  # also when it could not begin: the device may be at work on the last one
                if last is not None:
                    last[1]()
                    state.finish(last[0])
    except BaseException as error:
        state.stop(error)


def _close(state: _State, threads: list[threading.Thread]) -> None:
    state.stop()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
