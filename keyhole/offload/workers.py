"""Host jobs that run beside the thread that launches kernels.

    pool.submit(job, page=7, after=event, urgency=7)     returns at once
    pool.ready(7)                                        whether every job of page 7 is done; never waits
    pool.wait(7)                                         blocks until every job of page 7 is done

One thread runs the jobs, and torch's own threads do the arithmetic inside a job. (One Python thread per core would
request the GIL thousands of times per second and delay the launching thread; one worker requests it about three times
per chunk of a million elements.) torch keeps its number of threads per thread: the worker's setting does not change the
caller's.

Of the jobs whose CUDA event has fired, the worker takes the one with the lowest `urgency` (pass the position at which
its page is needed next: then the work that the next forward pass needs first is done first). If no event has fired, it
takes the oldest job and waits for its event; the caller's thread never waits.

A second thread (helper=True) takes jobs that can also run on the device: `on_device()` starts one and returns a
function that waits for its end. The helper starts the next job before it waits, so that the device is never idle.
Whichever thread is free takes the most urgent job; the relative speed of the two need not be known.

The first job that fails ends the work: queued jobs are dropped, the threads end, and the caller gets WorkerFailed with
the cause at its next submit, ready, wait or drain. Nothing hangs.
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
DeviceJob = Callable[[], Job]  # starts a job on the device, returns a function that waits for its end


class WorkerFailed(RuntimeError):
    """A job on the host raised an exception, which is the cause of this one."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """A submitted job."""

    job: Job
    page: Any
    after: Any  # a CUDA event, or None
    urgency: int
    on_device: DeviceJob | None

    def may_start(self) -> bool:
        return self.after is None or self.after.query()


def default_threads(launches_all_the_time: bool = False) -> int:
    """All cores but one. Three quarters of them where kernels are launched all the time beside this work (by our thread
    and by autograd's): a torch thread that shares a core with a launching thread delays its team, and the launches."""
    return max(1, 3 * cpu_count() // 4 if launches_all_the_time else cpu_count() - 1)


class Workers:
    """Runs jobs on the host in one thread, and in a second one with helper=True. threads: torch's threads inside a job;
    None: default_threads(), one less with a helper."""

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
        torch.set_num_threads(before)  # threads that are started later inherit this number
        self._end = weakref.finalize(self, _close, self._state, self._threads)

    def submit(
        self, job: Job, page: Any = None, after: Any = None, urgency: int = 0, on_device: DeviceJob | None = None
    ) -> Ticket:
        """Queues a job. after: a CUDA event that must fire before the job starts. on_device: the same job for the
        helper."""
        ticket = Ticket(job, page, after, urgency, on_device)
        with self._state.changed:
            self._state.check()
            self._state.waiting.append(ticket)
            self._state.pending[page] += 1
            self._state.changed.notify_all()
        return ticket

    def ready(self, page: Any) -> bool:
        """Whether this page has no unfinished job."""
        with self._state.changed:
            self._state.check()
            return self._state.pending[page] == 0

    def wait(self, page: Any) -> None:
        """Blocks until this page has no unfinished job."""
        self._wait_until(lambda: self._state.pending[page] == 0)

    def drain(self) -> None:
        """Blocks until no unfinished job is left."""
        self._wait_until(lambda: self._state.pending.total() == 0)

    def finish(self) -> bool:
        """Ends the threads after the last job, or after one that failed. False: one has failed, and whoever asks for a
        page gets the cause; or this is one of the threads (which may run Python's collector, and cannot wait for
        itself), and nothing was done."""
        if threading.current_thread() in self._threads:
            return False
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: state.error is not None or state.closed or state.pending.total() == 0)
        self.close()
        return state.error is None

    def close(self) -> None:
        """Drops the jobs that have not started and ends the threads. Safe to call again."""
        self._end()

    def _wait_until(self, done: Callable[[], bool]) -> None:
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.error is not None or self._state.closed or done())
            self._state.check()


class _State:
    """The state that threads and callers share, under one lock. (Not in Workers: the threads would keep it alive.)"""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.started = threading.Semaphore(0)
        self.waiting: list[Ticket] = []
        self.pending: Counter[Any] = Counter()  # page -> jobs not done
        self.error: BaseException | None = None
        self.closed = False

    def check(self) -> None:
        if self.error is not None:
            what = f"{type(self.error).__name__}: {self.error}"
            raise WorkerFailed(f"work on the host failed, the run cannot go on: {what}") from self.error
        assert not self.closed, "the workers were closed"

    def take(self, helper: bool = False, wait: bool = True) -> Ticket | None:
        """The next job for the worker or the helper. None: the work has ended, or, without `wait`, no job may start
        now."""
        with self.changed:
            jobs = [] if self.closed else self._jobs_for(helper)
            while wait and not jobs and not self.closed:
                self.changed.wait()
                jobs = self._jobs_for(helper)
            startable = [ticket for ticket in jobs if ticket.may_start()]
            if self.closed or not (startable or wait):
                return None
            ticket = min(startable, key=lambda t: t.urgency) if startable else jobs[0]
            self.waiting.remove(ticket)
            return ticket

    def _jobs_for(self, helper: bool) -> list[Ticket]:
        return [ticket for ticket in self.waiting if ticket.on_device is not None] if helper else self.waiting

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
    torch.get_num_threads()  # a thread's first call copies the process's number, and would overwrite a later setting
    torch.set_num_threads(threads)
    state.started.release()
    try:
        while (ticket := state.take()) is not None:
            if ticket.after is not None:
                ticket.after.synchronize()
            with torch.no_grad():
                ticket.job()
            state.finish(ticket)
    except BaseException as error:  # of any kind: the caller must be told
        state.stop(error)


def _help(state: _State) -> None:
    """Like _work, but on the device and one job ahead: it waits for a job after the next one has started."""
    torch.get_num_threads()
    torch.set_num_threads(1)
    state.started.release()
    begun: tuple[Ticket, Job] | None = None
    try:
        while (ticket := state.take(helper=True, wait=begun is None)) is not None or begun is not None:
            last, begun = begun, None
            try:
                if ticket is not None:
                    if ticket.after is not None:
                        ticket.after.synchronize()
                    assert ticket.on_device is not None  # take gives a helper no other
                    with torch.no_grad():
                        begun = ticket, ticket.on_device()
            finally:  # also when that failed: the device may still be running the last job
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
