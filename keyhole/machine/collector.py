"""What must not be interrupted by the garbage collector.

imports           The objects that an import creates (modules, classes, tables) stay alive, and Python's collector
                  traverses them again and again while torch and transformers are imported. Without it the imports
                  of `keyhole train` take 6.3 s of CPU time instead of 7.2 (Neoverse N1, torch 2.13, Transformers
                  5.22). Afterwards it would traverse them three times before the first step, for 1.05 s: a command
                  freezes them, and the collector never looks at them again. Ctrl-C ends the process there: libraries
                  catch KeyboardInterrupt inside of an import, and leave a half-imported module behind, which fails
                  later with an error that looks like a bug (torch does so with numpy).
CUDA captures     The collector might free a CUDA graph of a deleted model, and so invalidate the capture.
files of unknown  Brackets nested without end stop a parser at Python's recursion limit. If the collector ran there,
origin            finalizers of unrelated objects would fail for want of depth.
"""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from keyhole.machine.held import Setting

HEAVY = "transformers"
INTERRUPTED = 130  # exit code


COLLECTOR = Setting(gc.isenabled, lambda on: gc.enable() if on else gc.disable())


def no_collector() -> AbstractContextManager[None]:
    """Turns the collector off inside the context, and on again afterwards if it was on. The collector is the process's:
    while contexts of several threads overlap, it is off until the last of them ends."""
    return COLLECTOR.held(False)


@contextmanager
def imports(freeze: bool = True) -> Iterator[None]:
    """For the first import of the large libraries. freeze: the process is keyhole's own: whatever is alive afterwards
    is never collected, and Ctrl-C ends it at once. A program that uses keyhole may hold objects by then whose memory it
    wants back."""
    is_first = HEAVY not in sys.modules
    with no_collector(), _leaving_at_once() if freeze else nullcontext():
        yield
        if freeze and is_first and HEAVY in sys.modules:
            gc.freeze()
            atexit.register(gc.unfreeze)  # at the end extension modules look for what was not freed, and would print it


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Ctrl-C ends the process on the spot, where Python's own handler would raise KeyboardInterrupt."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    with suppress(OSError):
        os.write(2, b"keyhole: interrupted\n")
    os._exit(INTERRUPTED)
