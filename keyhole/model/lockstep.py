"""Several forward passes that advance together, unit by unit.

A zeroth-order step needs f(w + eps z) and f(w - eps z), and 2q such passes for q directions, times the number of
micro-batches. Run one after the other, each pass would pull every unit over the link again. In lockstep each unit
arrives once, all passes go through it, and only then the next unit is looked at.

Each pass is an ordinary call of the model's own forward. It runs on a thread of its own, but never beside another:
whoever holds the turn hands it over and sleeps. A pass gives its turn back when it is about to enter a module of
a unit it does not hold (`meet`), or when it has finished. So no model code is rewritten, there is no real
concurrency, and the order of the work is the same every time. (Measured: about 20 us a handover.)

    conductor:  serve(unit, resume)  ->  prepare weights, resume(pass) for each, ...
    pass i:                              ... runs through the unit, meets the next one, gives the turn back

PyTorch keeps the grad mode and the current stream by thread, so each pass takes them from the conductor.
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
    """Raised inside a pass that will not be resumed, so that its thread ends."""


class Pass:
    """One forward pass: its thread, the unit it waits for, and what it returned or raised."""

    def __init__(self, index: int, run: Callable[[], Any], conductor: "Lockstep") -> None:
        self.index, self.run, self.conductor = index, run, conductor
        self.turn = _closed_gate()
        self.wants: Any = None  # None at the start: the pass stands at the door
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        self.turn.acquire()
        try:
            with self.conductor.thread_state():
                if not self.conductor.abandoned:
                    self.result = self.run()
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the conductor, which raises it
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
    """Runs passes in lockstep; `current` is the pass that holds the turn."""

    def __init__(self, device: torch.device) -> None:
        self.turn = _closed_gate()
        self.current: Pass | None = None
        self.abandoned = False
        self.device = device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.grad = torch.is_grad_enabled()

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

    def run(self, passes: list[Callable[[], T]], serve: Callable[[Any, Callable[[int], None]], None]) -> list[T]:
        """Runs all passes to their end. serve(unit, resume) must call resume(i) for every pass i, in any order;
        resume(i) does nothing for a pass that is not waiting for this unit (passes may differ in what they visit).
        The first call has unit None: the passes stand at the door, before any unit."""
        everyone = [Pass(i, run, self) for i, run in enumerate(passes)]
        try:
            for one in everyone:
                one.thread.start()
            while waiting := [one for one in everyone if not one.done]:
                unit = waiting[0].wants
                here = {i for i, one in enumerate(everyone) if one.wants is unit and not one.done}

                def resume(i: int, here: set[int] = here) -> None:
                    if i in here:
                        here.discard(i)
                        self._resume(everyone[i])

                serve(unit, resume)
                assert not here, f"serve() left passes {sorted(here)} waiting"
        finally:
            self._abandon(everyone)
        return [one.result for one in everyone]

    def _abandon(self, everyone: list[Pass]) -> None:
        """After a failure: wakes every unfinished pass so that its thread ends."""
        self.abandoned = True
        for one in everyone:
            if one.thread.is_alive() and not one.done:
                one.turn.release()
                self.turn.acquire()
        for one in everyone:
            if one.thread.ident is not None:
                one.thread.join()
