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
the cause at its next submit, ready, wait or drain. Nothing hangs. The threads keep the pool alive: its owner closes it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from keyhole.machine.gpu import accelerator
from keyhole.machine.host import cpu_count

Job = Callable[[], None]
DeviceJob = Callable[[], Job]  # starts a job on the device, returns a function that waits for its end


class WorkerFailed(RuntimeError):
    """A job on the host raised an exception, which is the cause of this one."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """A submitted job. after: a CUDA event, or None."""

    job: Job
    page: Hashable
    after: accelerator.Event | None
    urgency: int
    on_device: DeviceJob | None


def default_threads(launches_all_the_time: bool = False) -> int:
    """All cores but one. Three quarters of them where kernels are launched all the time beside this work (by our thread
    and by autograd's): a torch thread that shares a core with a launching thread delays its team, and the launches."""
    return max(1, 3 * cpu_count() // 4 if launches_all_the_time else cpu_count() - 1)


class Workers:
    """Runs jobs on the host in one thread, and in a second one with helper=True. threads: torch's threads inside a job;
    None: default_threads(), one less with a helper."""

    def __init__(self, threads: int | None = None, helper: bool = False) -> None:
        self.threads = threads or max(1, default_threads() - helper)
        self._changed = threading.Condition()  # of all that follows
        self._waiting: list[Ticket] = []
        self._pending: Counter[Hashable] = Counter()  # page -> jobs not done
        self._error: BaseException | None = None
        self._closed = False
        self._started = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(self._work, self.threads), name="keyhole-host")]
        if helper:
            self._threads.append(threading.Thread(target=self._run, args=(self._help, 1), name="keyhole-helper"))
        before = torch.get_num_threads()
        for thread in self._threads:
            thread.daemon = True
            thread.start()
            self._started.acquire()
        torch.set_num_threads(before)  # threads that are started later inherit this number

    def submit(
        self,
        job: Job,
        page: Hashable = None,
        after: accelerator.Event | None = None,
        urgency: int = 0,
        on_device: DeviceJob | None = None,
    ) -> None:
        """Queues a job. after: a CUDA event that must fire before the job starts. on_device: the same job for the
        helper."""
        with self._changed:
            self._check()
            self._waiting.append(Ticket(job, page, after, urgency, on_device))
            self._pending[page] += 1
            self._changed.notify_all()

    def ready(self, page: Hashable) -> bool:
        """Whether this page has no unfinished job."""
        with self._changed:
            self._check()
            return self._pending[page] == 0

    def wait(self, page: Hashable) -> None:
        """Blocks until this page has no unfinished job."""
        self._wait_until(lambda: self._pending[page] == 0)

    def drain(self) -> None:
        """Blocks until no unfinished job is left."""
        self._wait_until(lambda: self._pending.total() == 0)

    def finish(self) -> bool:
        """Ends the threads after the last job, or after one that failed. False: one has failed, and whoever asks for a
        page gets the cause; or this is one of the threads (which may run Python's collector, and cannot wait for
        itself), and nothing was done."""
        if threading.current_thread() in self._threads:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._closed or self._pending.total() == 0)
        self.close()
        return self._error is None

    def close(self) -> None:
        """Drops the jobs that have not started and ends the threads. Safe to call again."""
        self._stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _check(self) -> None:
        if self._error is not None:
            what = f"{type(self._error).__name__}: {self._error}"
            raise WorkerFailed(f"work on the host failed, the run cannot go on: {what}") from self._error
        assert not self._closed, "the workers were closed"

    def _wait_until(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._closed or done())
            self._check()

    def _stop(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._error = self._error or error
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    # -- the threads -------------------------------------------------------------------------------------------------

    def _run(self, loop: Callable[[], None], threads: int) -> None:
        torch.get_num_threads()  # a thread's first call copies the process's number, and would overwrite a later one
        torch.set_num_threads(threads)
        self._started.release()
        try:
            with torch.no_grad():
                loop()
        except BaseException as error:  # of any kind: the caller must be told
            self._stop(error)

    def _work(self) -> None:
        while (ticket := self._take()) is not None:
            ticket.job()
            self._finished(ticket)

    def _help(self) -> None:
        """Like _work, but on the device and one job ahead: it waits for a job after the next one has started."""
        begun: tuple[Ticket, Job] | None = None
        while (ticket := self._take(helper=True, wait=begun is None)) is not None or begun is not None:
            last, begun = begun, None
            try:
                if ticket is not None:
                    assert ticket.on_device is not None  # a helper takes no other
                    begun = ticket, ticket.on_device()
            finally:  # also when that failed: the device may still be running the last job
                if last is not None:
                    last[1]()
                    self._finished(last[0])

    def _take(self, helper: bool = False, wait: bool = True) -> Ticket | None:
        """The next job, whose event has fired. None: the work has ended, or, without `wait`, no job may start now."""

        def jobs() -> list[Ticket]:
            return [ticket for ticket in self._waiting if ticket.on_device is not None or not helper]

        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or jobs())
            found = jobs()
            startable = [ticket for ticket in found if ticket.after is None or ticket.after.query()]
            if self._closed or not (startable or wait):
                return None
            ticket = min(startable, key=lambda each: each.urgency) if startable else found[0]
            self._waiting.remove(ticket)
        if ticket.after is not None:
            ticket.after.synchronize()
        return ticket

    def _finished(self, ticket: Ticket) -> None:
        with self._changed:
            self._pending[ticket.page] -= 1
            self._changed.notify_all()
