"""What must not be interrupted by the garbage collector.

imports           The objects that an import creates (modules, classes, tables) stay alive, and Python's collector
                  traverses them again and again while torch and transformers are imported. Without it the imports
                  of `keyhole train` take 6.3 s of CPU time instead of 7.2 (Neoverse N1, torch 2.13, Transformers
                  5.22).
CUDA captures     The collector might free a CUDA graph of a deleted model, and so invalidate the capture.
files of unknown  Brackets nested without end stop a parser at Python's recursion limit. If the collector ran there,
origin            finalizers of unrelated objects would fail for want of depth.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """Turns the collector off inside the context, and on again afterwards if it was on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
