"""Lockstep: the order of work is fixed, every unit is served once for all, and nothing survives a failure."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.callback import callback_handler

from keyhole.machine.settings import Changes
from keyhole.model.forward import lockstep
from keyhole.model.forward.compile import prepare_compiling
from keyhole.model.forward.lockstep import free_cores, pin_again

CPU = torch.device("cpu")


MADE: list["Lockstep"] = []


class Lockstep(lockstep.Lockstep):
    """The real one, remembered so that its threads can be ended."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        MADE.append(self)


@pytest.fixture(autouse=True)
def every_pass_is_idle() -> Iterator[None]:
    """Whatever a test does, its threads wait for work afterwards, and end when they are told to."""
    before = set(threading.enumerate())
    yield
    while MADE:
        MADE.pop().close()
    assert set(threading.enumerate()) <= before  # models of other tests may end theirs meanwhile


def visiting(conductor: Lockstep, log: list, index: int, units: list[Any]) -> Callable[[], int]:
    def run() -> int:
        log.append((index, None))
        for unit in units:
            conductor.current.meet(unit)
            log.append((index, unit))
        return index * 10

    return run


def serve_all(count: int, log: list) -> Callable:
    def serve(unit: Any, resume: Callable[[int], None]) -> None:
        log.append(("serve", unit))
        for i in range(count):
            resume(i)

    return serve


def test_passes_advance_together() -> None:
    """Each unit is served once and all passes go through it before the next one is looked at."""
    conductor, log = Lockstep(CPU), []
    results = conductor.run([visiting(conductor, log, i, ["a", "b"]) for i in range(3)], serve_all(3, log))
    assert results == [0, 10, 20]
    expected = [[("serve", unit), (0, unit), (1, unit), (2, unit)] for unit in (None, "a", "b")]
    assert log == sum(expected, [])


def test_order_of_resuming_is_the_servers() -> None:
    """Passes run in the order in which the server resumes them, and `current` is the one that runs."""
    conductor, log = Lockstep(CPU), []

    def serve(unit: Any, resume: Callable[[int], None]) -> None:
        resume(1)
        assert conductor.current is None
        resume(0)

    def run(index: int) -> Callable[[], None]:
        def body() -> None:
            log.append((index, conductor.current.index))

        return body

    conductor.run([run(0), run(1)], serve)
    assert log == [(1, 1), (0, 0)]


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=4))
def test_passes_may_visit_different_units(routes: list[list[int]]) -> None:
    """Each pass sees exactly its own units in its own order, whatever the others visit."""
    routes = [[u for k, u in enumerate(route) if k == 0 or u != route[k - 1]] for route in routes]
    conductor, log = Lockstep(CPU), []
    conductor.run([visiting(conductor, log, i, route) for i, route in enumerate(routes)], serve_all(len(routes), log))
    for i, route in enumerate(routes):
        assert [unit for who, unit in log if who == i] == [None, *route]
    served = [unit for who, unit in log if who == "serve"]
    assert len(served) - 1 <= sum(len(route) for route in routes)
    if all(route == routes[0] for route in routes):
        assert served == [None, *routes[0]]


def test_passes_see_the_context_of_the_conductor() -> None:
    """As it is now, in threads that are older (the compiler's settings are context variables)."""
    conductor, setting = Lockstep(CPU), ContextVar("setting", default=0)
    for value in (1, 2):
        setting.set(value)
        assert conductor.run([setting.get] * 3, serve_all(3, [])) == [value] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at", ["start", "a", "b", "end"])
def test_error_in_a_pass_reaches_the_caller(failing: int, at: str) -> None:
    """The pass's own exception is raised, and the other passes, wherever they wait, are ended."""
    conductor, log = Lockstep(CPU), []

    def body() -> None:
        for unit in ("start", "a", "b", "end"):
            if unit in ("a", "b"):
                conductor.current.meet(unit)
            if unit == at:
                raise KeyError(at)

    passes = [body if i == failing else visiting(conductor, log, i, ["a", "b"]) for i in range(3)]
    with pytest.raises(KeyError, match=at):
        conductor.run(passes, serve_all(3, log))


@pytest.mark.parametrize("at", [None, "a", "b"])
def test_error_in_the_server_ends_the_passes(at: str | None) -> None:
    """A server that fails (a damaged unit, an interrupt) leaves no pass behind."""
    conductor, log = Lockstep(CPU), []

    def serve(unit: Any, resume: Callable[[int], None]) -> None:
        if unit == at:
            raise KeyboardInterrupt
        for i in range(2):
            resume(i)

    with pytest.raises(KeyboardInterrupt):
        conductor.run([visiting(conductor, log, i, ["a", "b"]) for i in range(2)], serve)
    assert not any(unit == at for _, unit in log)


def test_forgotten_pass_is_a_bug() -> None:
    """A server that does not resume everybody is caught, not waited for."""
    conductor, log = Lockstep(CPU), []
    with pytest.raises(AssertionError, match="waiting"):
        conductor.run([visiting(conductor, log, i, ["a"]) for i in range(2)], serve_all(1, log))


@pytest.mark.parametrize("grad", [True, False])
def test_passes_take_the_grad_mode_of_the_caller(grad: bool) -> None:
    """PyTorch keeps the grad mode by thread; a pass sees its conductor's."""
    with torch.set_grad_enabled(grad):
        seen = Lockstep(CPU).run([torch.is_grad_enabled] * 2, lambda unit, resume: (resume(0), resume(1)))
    assert seen == [grad, grad]


@pytest.mark.parametrize("at", [None, "a", "b"])
def test_interrupt_waits_for_the_pass_to_hand_over(at: str | None) -> None:
    """Ctrl-C while a pass runs is raised at its next unit, and the next run is not met by what was left of it."""
    conductor = Lockstep(CPU)

    def body(interrupts: bool) -> Callable[[], str]:
        def run() -> str:
            for unit in (None, "a", "b"):
                if unit is not None:
                    conductor.current.meet(unit)
                if interrupts and unit == at:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    time.sleep(0.01)  # goes on while the conductor is being interrupted
            return "interrupted" if interrupts else "whole"

        return run

    def serve(unit: Any, resume: Callable[[int], None]) -> None:
        resume(0)
        resume(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may have it ignored
    try:
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                conductor.run([body(False), body(True)], serve)
            assert conductor.run([body(False)] * 2, serve) == ["whole", "whole"]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device whose launching threads are pinned, on a machine of several cores."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return torch.device("cuda")


def cores() -> set[int]:
    return os.sched_getaffinity(0)


@pytest.mark.parametrize("fails", [False, True])
def test_threads_are_on_one_core_only_while_they_run(a_gpu: torch.device, fails: bool) -> None:
    """All on the conductor's; afterwards conductor and passes may use every core again, also after a failure."""
    conductor, every, seen = Lockstep(a_gpu), cores(), []

    def body() -> None:
        seen.append(cores())
        conductor.current.meet("a")
        seen.append(cores())
        if fails:
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError) if fails else nullcontext():
            conductor.run([body] * 2, serve_all(2, []))
        assert all(len(one) == 1 and one == seen[0] for one in seen[-3:])
        assert cores() == every
        assert [os.sched_getaffinity(one.thread.native_id) for one in conductor.passes] == [every] * 2


def test_processes_that_the_compiler_starts_have_every_core(a_gpu: torch.device) -> None:
    """Code that is compiled inside a pass: the compiler's processes stay, so they must not share the pass's one core;
    the pass itself is back on it when the code runs. With the last model the compiler is as it was."""
    every, started, changes = cores(), [], [Changes(), Changes()]
    ask = "import os; print(sorted(os.sched_getaffinity(0)))"

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        started.append(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout)
        return graph.forward

    def body() -> tuple[set[int], set[int]]:
        before = cores()
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        return before, cores()

    for one in changes:
        prepare_compiling(one)
    changes[0].put_back()
    ((before, after),) = Lockstep(a_gpu).run([body], serve_all(1, []))
    assert started == [f"{sorted(every)}\n"] and before == after and len(before) == 1
    changes[1].put_back()
    assert free_cores not in callback_handler.start_callbacks and pin_again not in callback_handler.end_callbacks
