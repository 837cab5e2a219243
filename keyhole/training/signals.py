"""Ctrl-C and SIGTERM: the first asks, the second takes.

The first signal only sets a flag: the loop finishes its step, saves a checkpoint and returns 130. It also
gives the signal back to the system, so a second one ends the process at once, even inside a long copy or
write. That harms nothing: everything on disk is written beside its place and renamed when complete, and what
a dead process left half-written is swept away by the next run.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context that turns the first SIGINT or SIGTERM into `requested`; idle outside the main thread."""

    def __init__(self) -> None:
        self.requested: str | None = None  # the name of the signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._first) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _first(self, number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.requested = signal.Signals(number).name
        text = f"\nkeyhole: {self.requested}: finishing this step and saving; once more leaves at once\n"
        os.write(2, text.encode())  # print could have been interrupted itself, and may not be entered twice
