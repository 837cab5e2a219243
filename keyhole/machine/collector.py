"""What must not be interrupted by the garbage collector.

imports           The objects that an import creates (modules, classes, tables) stay alive, and Python's collector
                  traverses them again and again while torch and transformers are imported. Without it the imports
                  of `keyhole train` take 6.3 s of CPU time instead of 7.2 (Neoverse N1, torch 2.13, Transformers
                  5.22). Afterwards it would traverse them three times before the first step, for 1.05 s: a command
                  freezes them, and the collector never looks at them again.
CUDA captures     The collector might free a CUDA graph of a deleted model, and so invalidate the capture.
files of unknown  Brackets nested without end stop a parser at Python's recursion limit. If the collector ran there,
origin            finalizers of unrelated objects would fail for want of depth.
"""

import atexit
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HEAVY = "transformers"


class _Inside:
    """How many contexts of all threads are open, and whether the collector was on before the first of them."""

    def __init__(self) -> None:
        self.lock, self.count, self.was_on = threading.Lock(), 0, False

    def enter(self) -> None:
        with self.lock:
            if self.count == 0:
                self.was_on = gc.isenabled()
            self.count += 1
            gc.disable()

    def leave(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0 and self.was_on:
                gc.enable()


_inside = _Inside()


@contextmanager
def no_collector() -> Iterator[None]:
    """Turns the collector off inside the context, and on again afterwards if it was on. The collector is the process's:
    while contexts of several threads overlap, it is off until the last of them ends."""
    _inside.enter()
    try:
        yield
    finally:
        _inside.leave()


@contextmanager
def imports(freeze: bool = True) -> Iterator[None]:
    """For the first import of the large libraries. freeze: whatever is alive afterwards is never collected. Only for a
    process of keyhole's own: a program that uses keyhole may hold objects by then whose memory it wants back."""
    is_first = HEAVY not in sys.modules
    with no_collector():
        yield
        if freeze and is_first and HEAVY in sys.modules:
            gc.freeze()
            atexit.register(gc.unfreeze)  # at the end extension modules look for what was not freed, and would print it
