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

PyTorch keeps the grad mode and the current stream by thread, so each pass takes them from the conductor. CUDA
libraries keep handles and compiled plans by thread too (cuDNN's attention plan takes 90 ms to build), so the threads
stay from step to step.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def _closed_gate() -> threading.Lock:
    """A lock used as a gate: `release` opens it for one `acquire`. (Five times faster than a Semaphore.)"""
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Abandoned(BaseException):
    """Raised inside a pass that will not be resumed, so that it unwinds."""


class Pass:
    """One forward pass: its thread, the unit it waits for, and what it returned or raised."""

    def __init__(self, index: int, conductor: "Lockstep") -> None:
        self.index, self.conductor = index, conductor
        self.turn = _closed_gate()
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
                    self.result = self.run()
            except _Abandoned:
                pass
            except BaseException as error:
                self.error = error
            self.done = True
            self.conductor.turn.release()

    def meet(self, unit: Any) -> None:
        """Called on the pass's thread: gives the turn back until the unit is bound for this pass."""
        self.wants = unit
        self.conductor.turn.release()
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
        self.abandoned = False

    def thread_state(self) -> Any:
        torch.set_grad_enabled(self.grad)
        return torch.cuda.stream(self.stream)  # a no-op for None

    def _resume(self, one: Pass) -> None:
        self.current = one
        one.turn.release()
        self.turn.acquire()
        self.current = None
        if one.error is not None:
            raise one.error

    def run(self, runs: list[Callable[[], T]], serve: Callable[[Any, Callable[[int], None]], None]) -> list[T]:
        """Runs all passes to their end. serve(unit, resume) must call resume(i) for every pass i, in any order;
        resume(i) does nothing for a pass that is not waiting for this unit (passes may differ in what they visit).
        The first call has unit None: the passes stand at the door, before any unit."""
        self.grad = torch.is_grad_enabled()
        self.stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
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
                one.turn.release()
                self.turn.acquire()
            one.begin(None)

    def close(self) -> None:
        """Ends the threads."""
        for one in self.passes:
            one.begin(None)
            one.turn.release()
            one.thread.join()
        self.passes = []
