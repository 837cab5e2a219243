"""Lockstep: the order of work is fixed, every unit is served once for all, and nothing survives a failure."""

import gc
import signal
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.model.forward.lockstep import Lockstep
from keyhole.model.structure.layout import Unit

UNITS = {name: Unit(i, name, "block", 0, 0, []) for i, name in enumerate("abcde")}


def visiting(conductor: Lockstep, log: list, index: int, units: list[str]) -> Callable[[], int]:
    def run() -> int:
        log.append((index, None))
        for unit in units:
            conductor.current.meet(UNITS[unit])
            log.append((index, unit))
        return index * 10

    return run


def serve_all(count: int, log: list) -> Callable:
    def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
        log.append(("serve", unit and unit.name))
        for i in range(count):
            resume(i)

    return serve


def test_order_of_resuming_is_the_servers() -> None:
    conductor, log = Lockstep(), []

    def serve(unit: Any, resume: Callable[[int], None]) -> None:
        resume(1)
        assert conductor.current is None
        resume(0)

    def run(index: int) -> Callable[[], None]:
        return lambda: log.append((index, conductor.current.index))

    conductor.run([run(0), run(1)], serve)
    assert log == [(1, 1), (0, 0)]


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=6), min_size=1, max_size=4))
def test_passes_may_visit_different_units(routes: list[list[str]]) -> None:
    routes = [[u for k, u in enumerate(route) if k == 0 or u != route[k - 1]] for route in routes]
    conductor, log = Lockstep(), []
    conductor.run([visiting(conductor, log, i, route) for i, route in enumerate(routes)], serve_all(len(routes), log))
    for i, route in enumerate(routes):
        assert [unit for who, unit in log if who == i] == [None, *route]
    served = [unit for who, unit in log if who == "serve"]
    assert len(served) - 1 <= sum(len(route) for route in routes)
    if all(route == routes[0] for route in routes):
        assert served == [None, *routes[0]]


def test_a_pass_has_its_own_grad_mode_and_the_callers_context() -> None:
    conductor, setting, seen = Lockstep(), ContextVar("setting", default=0), []
    setting.set(1)

    def run(mode: bool) -> Callable[[], None]:
        def body() -> None:
            seen.append((setting.get(), torch.is_grad_enabled()))
            setting.set(2)
            torch.set_grad_enabled(mode)
            conductor.current.meet(UNITS["a"])
            seen.append((setting.get(), torch.is_grad_enabled()))

        return body

    for grad in (True, False):
        seen.clear()
        with torch.set_grad_enabled(grad):
            conductor.run([run(True), run(False)], serve_all(2, []))
            assert torch.is_grad_enabled() == grad and setting.get() == 1
        assert seen == [(1, grad), (1, grad), (2, True), (2, False)]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at", ["start", "a", "b", "end"])
def test_error_in_a_pass_reaches_the_caller(failing: int, at: str) -> None:
    conductor, ended, kept = Lockstep(), [], []

    def run(index: int) -> Callable[[], None]:
        def body() -> None:
            mine = torch.zeros(1)
            kept.append(weakref.ref(mine))
            try:
                for unit in ("start", "a", "b", "end"):
                    if unit in UNITS:
                        conductor.current.meet(UNITS[unit])
                    if unit == at and index == failing:
                        raise KeyError(at)
            finally:
                ended.append(index)

        return body

    with pytest.raises(KeyError, match=at):
        conductor.run([run(i) for i in range(3)], serve_all(3, []))
    begun = range(failing + 1) if at == "start" else range(3)
    assert sorted(ended) == [*begun] and conductor.current is None
    gc.collect()
    assert not any(one() is not None for one in kept)
    assert conductor.run([visiting(conductor, [], i, ["a"]) for i in range(2)], serve_all(2, [])) == [0, 10]


@pytest.mark.parametrize("at", [None, "a", "b"])
def test_error_in_the_server_ends_the_passes(at: str | None) -> None:
    conductor, log = Lockstep(), []

    def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
        if (unit and unit.name) == at:
            raise KeyboardInterrupt
        for i in range(2):
            resume(i)

    with pytest.raises(KeyboardInterrupt):
        conductor.run([visiting(conductor, log, i, ["a", "b"]) for i in range(2)], serve)
    assert not any(unit == at for _, unit in log)


def test_forgotten_pass_is_a_bug() -> None:
    conductor = Lockstep()
    with pytest.raises(AssertionError, match="waiting"):
        conductor.run([visiting(conductor, [], i, ["a"]) for i in range(2)], serve_all(1, []))


@pytest.mark.parametrize("at", [None, "a", "b"])
def test_an_interrupt_in_a_pass_ends_the_run(at: str | None) -> None:
    conductor = Lockstep()

    def body(interrupts: bool) -> Callable[[], str]:
        def run() -> str:
            for unit in (None, "a", "b"):
                if unit is not None:
                    conductor.current.meet(UNITS[unit])
                if interrupts and unit == at:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return "whole"

        return run

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may have it ignored
    try:
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                conductor.run([body(False), body(True)], serve_all(2, []))
            assert conductor.run([body(False)] * 2, serve_all(2, [])) == ["whole", "whole"]
    finally:
        signal.signal(signal.SIGINT, before)
