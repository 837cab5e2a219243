"""Several forward passes that advance together, unit by unit.

A zeroth-order step needs f(w + eps z) and f(w - eps z), and 2q such passes for q directions, times the number of
micro-batches. Run one after the other, each pass would pull every unit over the link again. In lockstep each unit
arrives once, all passes go through it, and only then the next unit is looked at.

Each pass is an ordinary call of the model's own forward. It runs on a thread of its own, but never beside another:
whoever holds the turn hands it over and sleeps. A pass gives its turn back when it is about to enter a module of
a unit it does not hold (`meet`), or when it has finished. So no model code is rewritten, there is no real
concurrency, and the order of the work is the same every time. A handover takes about 10 us.

    conductor:  serve(unit, resume)  ->  prepare weights, resume(pass) for each, ...
    pass i:                              ... runs through the unit, meets the next one, gives the turn back

PyTorch keeps the grad mode, the current stream and (2.13) the compiler's settings by thread, so each pass takes them
from the conductor. CUDA libraries keep handles and compiled plans by thread too (cuDNN's attention plan takes 90 ms to
build), so the threads stay from step to step. And on a GPU all of them stay on one core: launching kernels is what they
do, and each launch takes twice as long on a core that has just been woken, with cold caches (62 -> 38 ms a step of a
1.3B model).
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def _closed_gate() -> threading.Lock:
    """A lock used as a gate: `release` opens it for one `acquire`. (Five times faster than a Semaphore.)"""
    gate = threading.Lock()
    gate.acquire()
    return gate


def _this_core() -> set[int] | None:
    """The core that the calling thread runs on, where the system tells."""
    try:
        return {ctypes.CDLL(None).sched_getcpu()}
    except (AttributeError, OSError):
        return None


def _stay_on(cores: set[int] | None) -> set[int] | None:
    """Keeps the calling thread on these cores; returns those it could use before. None: leave it as it is."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        return None
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    return before


class _Abandoned(BaseException):
    """Raised inside a pass that will not be resumed, so that it unwinds."""


class Pass:
    """One forward pass: its thread, the unit it waits for, and what it returned or raised."""

    def __init__(self, index: int, conductor: "Lockstep") -> None:
        self.index, self.conductor = index, conductor
        self.turn = _closed_gate()
        self.given = self.returned = 0  # turns, counted by the conductor and by the pass
        self.begin(None)
        self.thread = threading.Thread(target=self._main, name=f"keyhole pass {index}", daemon=True)
        self.thread.start()

    def begin(self, run: Callable[[], Any] | None) -> None:
        """Gives the thread something to run; it starts when it gets the turn."""
        self.run = run
        self.wants: Any = None  # None at first: the pass stands at the door
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = run is None

    def _main(self) -> None:
        while True:
            self.turn.acquire()
            if self.run is None:
                return
            try:
                with self.conductor.thread_state():
                    self.result = self.conductor.context.copy().run(self.run)
            except _Abandoned:
                pass
            except BaseException as error:
                self.error = error
            self.done = True
            self._give_back()

    def _give_back(self) -> None:
        self.conductor.turn.release()
        self.returned += 1

    def meet(self, unit: Any) -> None:
        """Called on the pass's thread: gives the turn back until the unit is bound for this pass."""
        self.wants = unit
        self._give_back()
        self.turn.acquire()
        if self.conductor.abandoned:
            raise _Abandoned


class Lockstep:
    """Runs passes in lockstep; `current` is the pass that holds the turn. Threads are kept between runs."""

    def __init__(self, device: torch.device) -> None:
        self.turn = _closed_gate()
        self.device = device
        self.passes: list[Pass] = []
        self.current: Pass | None = None
        self.abandoned = self.whole = self.steady = False

    def thread_state(self) -> Any:
        _stay_on(self.core)
        torch.set_grad_enabled(self.grad)
        return torch.cuda.stream(self.stream)  # a no-op for None

    def _resume(self, one: Pass) -> None:
        self.current = one
        self._hand_over(one)
        self.current = None
        if one.error is not None:
            raise one.error

    def _hand_over(self, one: Pass) -> None:
        """Gives the pass its turn and waits to get it back. Ctrl-C meanwhile is raised when the pass has given it
        back, at the next unit at the latest: a pass that went on by itself would turn up in the next run."""
        one.given += 1
        try:
            one.turn.release()
            self.turn.acquire()
        except KeyboardInterrupt:
            while one.returned < one.given:
                time.sleep(1e-4)
            self.turn.acquire(blocking=False)  # closed again, whether or not we had it
            raise

    def run(self, runs: list[Callable[[], T]], serve: Callable[[Any, Callable[[int], None]], None]) -> list[T]:
        """Runs all passes to their end. serve(unit, resume) must call resume(i) for every pass i, in any order;
        resume(i) does nothing for a pass that is not waiting for this unit (passes may differ in what they visit).
        The first call has unit None: the passes stand at the door, before any unit."""
        self.grad, self.context = torch.is_grad_enabled(), copy_context()
        self.stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self.core = _this_core() if self.stream is not None else None
        before = _stay_on(self.core)
        self.abandoned = False
        while len(self.passes) < len(runs):
            self.passes.append(Pass(len(self.passes), self))
        everyone = self.passes[: len(runs)]
        for one, run in zip(everyone, runs, strict=True):
            one.begin(run)
        try:
            while waiting := [one for one in everyone if not one.done]:
                self._serve(waiting[0].wants, waiting, serve)
            return [one.result for one in everyone]
        finally:
            self._abandon(everyone)
            _stay_on(before)

    def _serve(self, unit: Any, waiting: list[Pass], serve: Callable[[Any, Callable[[int], None]], None]) -> None:
        here = {one.index: one for one in waiting if one.wants is unit}

        def resume(i: int) -> None:
            if i in here:
                self._resume(here.pop(i))

        serve(unit, resume)
        assert not here, f"serve() left passes {sorted(here)} waiting"

    def _abandon(self, everyone: list[Pass]) -> None:
        """Unwinds every unfinished pass, after a failure; forgets what the others returned."""
        self.abandoned = True
        for one in everyone:
            if not one.done and one.wants is not None:
                with suppress(KeyboardInterrupt):  # one more changes nothing
                    self._hand_over(one)
            one.begin(None)

    def close(self) -> None:
        """Ends the threads."""
        for one in self.passes:
            one.begin(None)
            one.turn.release()
            one.thread.join()
        self.passes = []
