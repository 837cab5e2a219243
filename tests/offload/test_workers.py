"""Host workers: order, readiness, errors that reach the caller, and threads that end."""

import threading
import time

import pytest
import torch

from keyhole.offload.workers import WorkerFailed, Workers, default_threads

WAIT_S = 20


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.waited_by: str | None = None

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        self.waited_by = threading.current_thread().name
        assert self.happened.wait(WAIT_S)


def fail() -> None:
    raise MemoryError("no device any more")


@pytest.fixture
def pool() -> Workers:
    workers = Workers(threads=1)
    yield workers
    workers.close()
    assert not workers._threads[0].is_alive()


def test_a_page_is_ready_when_all_its_jobs_are_done(pool: Workers) -> None:
    gate, done = Event(), []
    assert pool.ready(3)
    pool.submit(lambda: done.append("first"), page=3)
    pool.submit(lambda: done.append("second"), page=3, after=gate)
    assert not pool.ready(3) and pool.ready(4)
    pool.wait(4)
    gate.happened.set()
    pool.wait(3)
    assert done == ["first", "second"] and pool.ready(3)


def test_the_most_urgent_job_that_may_start_is_next(pool: Workers) -> None:
    begin, late, order = Event(), Event(), []
    pool.submit(lambda: None, after=begin)
    while begin.waited_by is None:
        time.sleep(0.001)
    for page in (5, 3, 1, 4):
        pool.submit(lambda page=page: order.append(page), page=page, after=late if page == 1 else None, urgency=page)
    begin.happened.set()
    for page in (3, 4, 5):
        pool.wait(page)
    assert order == [3, 4, 5] and not pool.ready(1)
    late.happened.set()
    pool.drain()
    assert order == [3, 4, 5, 1]


@pytest.mark.parametrize("call", ["submit", "ready", "wait", "drain"])
def test_the_first_error_stops_the_caller_with_its_cause(call: str) -> None:
    pool, ran = Workers(threads=1), []
    gate = Event()
    pool.submit(lambda: None, after=gate)
    pool.submit(fail, page=1, urgency=1)
    pool.submit(lambda: ran.append(1), page=2, urgency=2)
    gate.happened.set()
    pool._threads[0].join(WAIT_S)
    assert not pool._threads[0].is_alive() and ran == []
    arguments = {"submit": (lambda: None,), "drain": ()}.get(call, (2,))
    with pytest.raises(WorkerFailed, match="MemoryError: no device any more") as caught:
        getattr(pool, call)(*arguments)
    assert isinstance(caught.value.__cause__, MemoryError)
    pool.close()


def test_a_caller_that_waits_already_is_woken_by_the_error(pool: Workers) -> None:
    gate = Event()
    pool.submit(fail, page=0, after=gate)
    pool.submit(lambda: None, page=1, urgency=1, after=gate)
    threading.Timer(0.05, gate.happened.set).start()
    with pytest.raises(WorkerFailed, match="no device any more"):
        pool.wait(1)


def test_finish_waits_for_the_last_job_and_never_for_its_own_thread() -> None:
    pool, done, found = Workers(threads=1), [], []
    pool.submit(lambda: found.append(pool.finish()))
    for i in range(20):
        pool.submit(lambda i=i: done.append(i))
    assert pool.finish() and found == [False] and done == list(range(20))
    assert not pool._threads[0].is_alive() and pool.finish()


@pytest.mark.parametrize("helper", [False, True])
def test_torch_threads_of_the_caller_stay(helper: bool) -> None:
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(1)
        pool = Workers(threads=2, helper=helper)
        pool.submit(lambda: seen.append(torch.get_num_threads()))
        pool.drain()
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        pool.close()
        assert seen == [2, 1] and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_jobs_leave_the_interpreter_to_the_caller(pool: Workers) -> None:
    from keyhole.ops.adam import host_adamw_

    state = list(torch.zeros(3, 2**23).unbind())
    grad, turns = torch.zeros(2**23, dtype=torch.bfloat16), 0
    pool.submit(lambda: host_adamw_(*state, grad, grad, step=1, lr=1e-3, scratch=torch.empty(2**23)), page=0)
    while not pool.ready(0):
        turns += 1
    assert turns > 20  # holding the GIL for the three calls of the job would leave four


# -- the helper ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Workers:
    workers = Workers(threads=1, helper=True)
    yield workers
    workers.close()
    assert not any(thread.is_alive() for thread in workers._threads)


def test_the_helper_takes_jobs_that_can_be_done_on_the_device(pair: Workers) -> None:
    gate, end, done = threading.Event(), threading.Event(), []
    pair.submit(lambda: gate.wait(WAIT_S), page=0)
    for page in (1, 2):
        on_device = lambda page=page: done.append(page) or (lambda: end.wait(WAIT_S))  # noqa: E731
        pair.submit(lambda page=page: done.append(-page), page=page, on_device=on_device)
    while len(done) < 2:
        time.sleep(1e-3)
    assert done == [1, 2] and not pair.ready(1)
    end.set()
    pair.wait(1)
    pair.wait(2)
    assert not pair.ready(0)
    gate.set()
    pair.drain()
    assert done == [1, 2]


def test_every_job_is_done_once_by_one_of_the_two(pair: Workers) -> None:
    done = []
    for i in range(200):
        on_device = lambda i=i: done.append(i) or (lambda: time.sleep(1e-4))  # noqa: E731
        pair.submit(lambda i=i: done.append(i), page=i % 7, urgency=i % 7, on_device=on_device)
    pair.drain()
    assert sorted(done) == list(range(200))


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_helper_that_fails_stops_the_caller(when: str) -> None:
    pool, gate = Workers(threads=1, helper=True), threading.Event()

    pool.submit(lambda: gate.wait(WAIT_S), page=0)
    pool.submit(lambda: None, page=1, on_device=fail if when == "begin" else lambda: fail)
    with pytest.raises(WorkerFailed, match="no device any more"):
        pool.wait(1)
    gate.set()
    pool.close()
    assert not any(thread.is_alive() for thread in pool._threads)


def test_what_was_begun_on_the_device_is_waited_for_when_the_next_cannot_begin() -> None:
    """Memory of the first may be freed once the threads are gone: not while the device is at work on it."""
    pool, gate, ended = Workers(threads=1, helper=True), threading.Event(), []

    pool.submit(lambda: gate.wait(WAIT_S), page=0)
    with pool._changed:  # both at once: the second is there when the first has begun
        pool.submit(lambda: None, page=1, urgency=1, on_device=lambda: lambda: ended.append(1))
        pool.submit(lambda: None, page=2, urgency=2, on_device=fail)
    pool._threads[1].join(WAIT_S)
    with pytest.raises(WorkerFailed, match="no device any more"):
        pool.ready(1)
    assert ended == [1]
    gate.set()
    pool.close()


def test_threads_leave_cores_to_who_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One, and one for the helper; a quarter where kernels are launched all the time; at least one thread is left."""
    for cores, usual, launching, helped in ((8, 7, 6, 6), (2, 1, 1, 1), (1, 1, 1, 1)):
        monkeypatch.setattr("keyhole.offload.workers.cpu_count", lambda cores=cores: cores)
        assert (default_threads(), default_threads(True)) == (usual, launching)
        found = []
        for how in ({}, {"helper": True}, {"threads": 3, "helper": True}):
            workers = Workers(**how)
            found.append(workers.threads)
            workers.close()
        assert found == [usual, helped, 3]
