"""Ctrl-C outside of the training loop: the command ends at once, with one line and exit code 130.

Inside of an import, KeyboardInterrupt is not safe: libraries catch it, and leave a half-imported module behind, which
fails later with an error that looks like a bug (torch does so with numpy). So a Ctrl-C that comes during an import ends
the process on the spot. Nothing is lost by that: files are complete before they get their names (disk/files.py), and
during training other handlers are in force (training/signals.py).
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from keyhole.training.signals import EXIT_INTERRUPTED

IMPORTERS = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


@contextmanager
def safe_imports() -> Iterator[None]:
    """A context in which Ctrl-C leaves no module half-imported. Handlers other than Python's own stay."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _hear(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename in IMPORTERS:
            with suppress(Exception):  # the import may have been one of a print
                sys.stdout.flush()
            with suppress(OSError):
                os.write(2, b"keyhole: interrupted\n")
            os._exit(EXIT_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
