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


_lock = threading.Lock()
_open: list[bool] = []  # of every open context of any thread: whether the collector was on before it


@contextmanager
def no_collector() -> Iterator[None]:
    """Turns the collector off inside the context, and on again afterwards if it was on. The collector is the process's:
    while contexts of several threads overlap, it is off until the last of them ends."""
    with _lock:
        _open.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _open.pop() and not _open:  # the first one's
                gc.enable()


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
