"""Several forward passes that advance together, unit by unit.

A zeroth-order step needs f(w + eps z) and f(w - eps z): 2q passes for q directions, times the number of micro-batches.
Run one after the other, each pass would upload every unit again. In lockstep each unit arrives once, all passes run
through it, and only then the next unit is loaded.

Each pass is a call of the model's own forward on a thread of its own, but only one thread runs at a time: it holds the
*turn*, and all others are blocked. A pass returns the turn when it is about to enter a module of a unit whose weights
it does not hold (`meet`), or when it has finished. So no model code is rewritten, there is no real concurrency, and the
order of execution is always the same. Passing the turn takes 5 to 10 us; all of it, for two passes, 25 us per unit, of
the 310 that a unit of `zo` takes (Neoverse N1).

    conductor:  serve(unit, resume)  ->  prepare weights, resume(pass) for each, ...
    pass i:                              ... runs through the unit, meets the next one, returns the turn

Passes differ in the experts that they need (forward/experts.py). Each requests its own in ascending order. The lowest
expert that any pass waits for is served first, and other units only when no pass waits for an expert, so each expert is
served once.

A single pass need not wait for others: it may run on the conductor's own thread, and `meet` is then a call of serve.

PyTorch keeps the grad mode, the current stream and (2.13) the compiler's settings per thread, so each pass copies them
from the conductor. CUDA libraries also keep handles and compiled plans per thread (cuDNN's attention plan takes 90 ms
to build), so the threads are kept from step to step. On a GPU all threads are pinned to one core during a run: they
only launch kernels, and a launch takes twice as long on a core that was idle, with cold caches (62 -> 38 ms per step of
a 1.3B model). A process that a pinned thread starts inherits its one core, and the compiler starts long-lived workers:
so threads are unpinned while they compile (forward/compile.py), and when the run ends.
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


def _turn() -> threading.Lock:
    """A lock that the thread waiting for a turn acquires, and the thread that gives the turn releases. (Five times
    faster than a Semaphore.)"""
    turn = threading.Lock()
    turn.acquire()
    return turn


def _this_core() -> set[int] | None:
    """The core that the calling thread runs on; None if the system does not report it or cannot pin threads."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        return {ctypes.CDLL(None).sched_getcpu()}
    except (AttributeError, OSError):
        return None


class _Cores(threading.local):
    """Per thread: the core that it is pinned to (None: not pinned), and the cores that it may use otherwise."""

    pinned: set[int] | None = None
    free: set[int] = set()


_cores = _Cores()


def _pin(core: set[int] | None, free: set[int]) -> None:
    """Pins the calling thread to a core. None: leaves it as it is."""
    if core is not None:
        os.sched_setaffinity(0, core)
        _cores.pinned, _cores.free = core, free


def _unpin() -> None:
    if _cores.pinned is not None:
        os.sched_setaffinity(0, _cores.free)
        _cores.pinned = None


def free_cores(*_: Any) -> None:
    """Lets the calling thread use all of its cores until `pin_again`, if it is pinned."""
    if _cores.pinned is not None:
        os.sched_setaffinity(0, _cores.free)


def pin_again(*_: Any) -> None:
    """Pins the calling thread again, after `free_cores`."""
    if _cores.pinned is not None:
        os.sched_setaffinity(0, _cores.pinned)


def _turn_of(unit: Any) -> tuple[int, int]:
    """Sort key: experts ascending; for one expert, its upper matrix first."""
    return unit.expert, unit.index


class _Abandoned(BaseException):
    """Raised inside a pass that will not be resumed, so that it unwinds."""


class Pass:
    """One forward pass: its thread, the unit it waits for, and what it returned or raised."""

    def __init__(self, index: int, conductor: "Lockstep") -> None:
        self.index, self.conductor = index, conductor
        self.turn = _turn()
        self.turns_given = self.turns_returned = 0  # counted by the conductor, and by the pass
        self.begin(None)
        self.thread = threading.Thread(target=self._main, name=f"keyhole pass {index}", daemon=True)
        self.thread.start()

    def begin(self, run: Callable[[], Any] | None) -> None:
        """Sets the function that the thread runs when it gets the turn."""
        self.run = run
        self.unit: Any = None  # the unit that it holds or waits for; None: it has not entered any
        self.ahead: list[Any] = []  # expert units that it has announced
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = run is None

    def _main(self) -> None:
        while True:
            self.turn.acquire()
            if self.run is None:
                return
            try:
                with self.conductor.thread_state(self.index):
                    self.result = self.conductor.context.copy().run(self.run)
            except _Abandoned:
                pass
            except BaseException as error:
                self.error = error
            _unpin()
            self.done = True
            self._return_turn()

    def _return_turn(self) -> None:
        self.conductor.turn.release()
        self.turns_returned += 1

    def meet(self, unit: Any) -> None:
        """Called on the pass's thread: returns the turn, and continues when the unit is bound for this pass."""
        self.unit = unit
        self._return_turn()
        self.turn.acquire()
        if self.conductor.abandoned:
            raise _Abandoned

    def will_meet(self, units: list[Any]) -> None:
        """Announces the expert units that the pass will need next."""
        self.ahead = units


class _Alone:
    """A single pass on the conductor's thread."""

    index = 0

    def __init__(self, serve: Callable[[Any, Callable[[int], None]], None]) -> None:
        self.unit = None
        self.serve: Any = serve

    def meet(self, unit: Any) -> None:
        self.unit = unit
        self.serve(unit, _nothing)


def _nothing(index: int) -> None:
    """Resumes a pass that is not waiting."""


class Lockstep:
    """Runs passes in lockstep; `current` is the pass that has the turn. Threads are kept between runs."""

    def __init__(self, device: torch.device) -> None:
        self.turn = _turn()
        self.device = device
        self.passes: list[Pass] = []
        self.current: Any = None  # Pass or _Alone
        self.rows: Any = None  # the embedding's rows for a pass, if they are not the table's
        self.abandoned = self.block_at_once = self.steady = False
        self.streams: dict[int, torch.cuda.Stream] = {}  # of passes that do not use the conductor's (branches.py)
        self.expect: Callable[[list[Any]], None] = lambda units: None  # called with the experts that passes will need

    def thread_state(self, index: int) -> Any:
        """A context that gives the thread of a pass the conductor's core and grad mode, and a stream: that of the pass,
        or the conductor's."""
        _pin(self.core, self.free)
        torch.set_grad_enabled(self.grad)
        return torch.cuda.stream(self.streams.get(index, self.stream))  # a no-op for None

    def _resume(self, one: Pass) -> None:
        self.current = one
        self._give_turn(one)
        self.current = None
        if one.error is not None:
            raise one.error

    def _give_turn(self, one: Pass) -> None:
        """Gives the pass the turn and waits until it is returned. A Ctrl-C is raised only after that, at the next unit
        at the latest: a pass that kept running would interfere with the next run."""
        one.turns_given += 1
        try:
            one.turn.release()
            self.turn.acquire()
        except KeyboardInterrupt:
            while one.turns_returned < one.turns_given:
                time.sleep(1e-4)
            self.turn.acquire(blocking=False)  # locks it again, whether or not the interrupted acquire succeeded
            raise

    def run_alone(self, run: Callable[[], T], serve: Callable[[Any, Callable[[int], None]], None]) -> T:
        """Runs one pass on the calling thread. serve is called as by `run`, but resume returns at once: serve must have
        done all its work by then, and what it holds open around resume has no effect on the pass."""
        self._begin()
        self.current = alone = _Alone(serve)
        try:
            _pin(self.core, self.free)
            serve(None, _nothing)
            return run()
        finally:
            self.current, alone.serve = None, None
            _unpin()

    def _begin(self) -> None:
        """Notes the state of the calling thread, which passes share."""
        self.grad, self.context = torch.is_grad_enabled(), copy_context()
        self.stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self.core = _this_core() if self.stream is not None else None
        self.free = set() if self.core is None else os.sched_getaffinity(0)
        self.abandoned = False

    def run(self, runs: list[Callable[[], T]], serve: Callable[[Any, Callable[[int], None]], None]) -> list[T]:
        """Runs all passes to their end. serve(unit, resume) must call resume(i) for every pass i, in any order;
        resume(i) does nothing for a pass that is not waiting for this unit (passes may visit different units). The
        first call has unit None: no pass has entered a unit yet."""
        self._begin()
        while len(self.passes) < len(runs):
            self.passes.append(Pass(len(self.passes), self))
        everyone = self.passes[: len(runs)]
        for one, run in zip(everyone, runs, strict=True):
            one.begin(run)
        try:
            _pin(self.core, self.free)
            while waiting := [one for one in everyone if not one.done]:
                self._serve(self._next(waiting), waiting, serve)
            return [one.result for one in everyone]
        finally:
            self._abandon(everyone)
            _unpin()

    def _next(self, waiting: list[Pass]) -> Any:
        """The unit to serve: the lowest expert that a pass waits for, else the unit that the first pass waits for."""
        inside = [one for one in waiting if getattr(one.unit, "expert", None) is not None]
        if not inside:
            return waiting[0].unit
        if any(one.ahead for one in inside):
            self.expect(sorted({unit.index: unit for one in inside for unit in one.ahead}.values(), key=_turn_of))
            for one in inside:
                one.ahead = []
        return min((one.unit for one in inside), key=_turn_of)

    def _serve(self, unit: Any, waiting: list[Pass], serve: Callable[[Any, Callable[[int], None]], None]) -> None:
        here = {one.index: one for one in waiting if one.unit is unit}

        def resume(i: int) -> None:
            if i in here:
                self._resume(here.pop(i))

        serve(unit, resume)
        assert not here, f"serve() left passes {sorted(here)} waiting"

    def _abandon(self, everyone: list[Pass]) -> None:
        """Unwinds every unfinished pass after an error, and drops the results of the others."""
        self.abandoned = True
        for one in everyone:
            if not one.done and one.unit is not None:
                with suppress(KeyboardInterrupt):  # the run is being abandoned already
                    self._give_turn(one)
            one.begin(None)

    def close(self) -> None:
        """Ends the threads."""
        for one in self.passes:
            one.begin(None)
            one.turn.release()
            one.thread.join()
        self.passes = []
