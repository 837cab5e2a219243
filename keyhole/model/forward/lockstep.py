"""Several forward passes that advance together, unit by unit.

A zeroth-order step needs f(w + eps z) and f(w - eps z): 2q passes for q directions, times the number of micro-batches.
Run one after the other, each pass would upload every unit again. In lockstep each unit arrives once, all passes run
through it, and only then the next unit is loaded.

Each pass is a call of the model's own forward in a greenlet, a stack of its own in the caller's thread. When it is
about to enter a module of a unit whose weights it does not hold, it switches to the conductor (`meet`), which switches
back when the unit is there. So no model code is rewritten, nothing runs at the same time, and the order of execution is
always the same; an error, or Ctrl-C, in a pass is raised by the switch that resumed it.

    conductor:  serve(unit, resume)  ->  prepare weights, resume(pass) for each, ...
    pass i:                              ... runs through the unit, meets the next one, switches back

Passes differ in the experts that they need (pieces.py). Each requests its own in ascending order. The lowest
expert that any pass waits for is served first, and other units only when no pass waits for an expert, so each expert is
served once.

Grad mode and streams are the thread's: a pass keeps the grad mode that it has set when others run in between. Context
variables belong to a greenlet; a pass begins with a copy of the caller's.
"""

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from greenlet import greenlet

from keyhole.machine.gpu import accelerator
from keyhole.model.structure.layout import Unit

T = TypeVar("T")
Serve = Callable[[Unit | None, Callable[[int], None]], None]


class Pass:
    """One forward pass: its greenlet, the unit that it holds or waits for, and what it returned."""

    def __init__(self, index: int, stack: greenlet) -> None:
        self.index, self.stack = index, stack
        stack.gr_context = copy_context()
        self.unit: Unit | None = None  # None: it has not entered any
        self.ahead: list[Unit] = []  # expert units that it has announced: those that it will need next
        self.result: Any = None

    def meet(self, unit: Unit) -> None:
        """Called in the pass: returns when the unit is bound for it."""
        self.unit, grad = unit, torch.is_grad_enabled()
        parent = self.stack.parent
        assert parent is not None
        parent.switch()
        torch.set_grad_enabled(grad)


class Lockstep:
    """Runs passes in lockstep; `current` is the pass that runs."""

    def __init__(self) -> None:
        self.current: Any = None
        self.rows: Any = None  # the embedding's rows for a pass, if they are not the table's
        self.block_at_once = self.steady = False
        self.holds: dict[int, tuple[int, tuple]] = {}  # pass -> the block that it waits for, and the arguments of that
        self.streams: dict[int, accelerator.Stream] = {}  # of passes that do not use the conductor's (captured.py)
        self.expect: Callable[[list[Unit]], None] = lambda units: None  # called with the experts that passes will need

    def run(self, runs: list[Callable[[], T]], serve: Serve) -> list[T]:
        """Runs all passes to their end. serve(unit, resume) must call resume(i) for every pass i, in any order;
        resume(i) does nothing for a pass that is not waiting for this unit (passes may visit different units). The
        first call has unit None: no pass has entered a unit yet."""
        passes = [Pass(i, greenlet(run)) for i, run in enumerate(runs)]
        try:
            while waiting := [one for one in passes if not one.stack.dead]:
                unit = self._next(waiting)
                self._serve(unit, {one.index: one for one in waiting if one.unit is unit}, serve)
            return [one.result for one in passes]
        finally:
            for one in passes:  # after an error: unwinds those that wait
                with suppress(Exception):
                    one.stack.throw()
            self.holds.clear()

    def _next(self, waiting: list[Pass]) -> Unit | None:
        """The unit to serve: the lowest expert that a pass waits for, else the unit that the first pass waits for. For
        one expert, its upper matrix comes first."""
        inside = [one.unit for one in waiting if one.unit is not None and one.unit.expert is not None]
        if not inside:
            return waiting[0].unit
        if ahead := {unit.index: unit for one in waiting for unit in one.ahead}:
            self.expect(sorted(ahead.values(), key=_place))
            for one in waiting:
                one.ahead = []
        return min(inside, key=_place)

    def _serve(self, unit: Unit | None, here: dict[int, Pass], serve: Serve) -> None:
        def resume(i: int) -> None:
            if i in here:
                self.current, grad = here.pop(i), torch.is_grad_enabled()
                try:
                    with accelerator.stream(self.streams.get(i)):  # nothing for None
                        self.current.result = self.current.stack.switch()  # until it meets its next unit, or has ended
                finally:
                    torch.set_grad_enabled(grad)
                    self.current = None

        serve(unit, resume)
        assert not here, f"serve() left passes {sorted(here)} waiting"


def _place(unit: Unit) -> tuple[int, int]:
    return unit.expert or 0, unit.index
