"""Ctrl-C, SIGTERM, a closed terminal: the first signal asks the run to stop, a later one ends it at once.

The first signal only sets a flag: the loop finishes its step, saves a checkpoint and returns 130. A later one ends the
process as soon as Python runs again. That is safe: all files are written under a temporary name and renamed when
complete, and the next run deletes the leftovers of a dead process. Signals within GRACE_S of the first count as one
request, because a closed terminal, `timeout` and job launchers send one to the process and one to its group.

A closed terminal sends SIGHUP, and the reader of a pipe may exit (display.py): both ask the run to stop too. If SIGHUP
is ignored it stays ignored: `nohup keyhole train ...` outlives its terminal.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 130
GRACE_S = 0.25
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context that turns the first signal into `requested`; idle outside the main thread. quiet: prints nothing,
    because another process does."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.requested: str | None = None  # the name of the signal
        self._before: dict[int, Any] = {}
        self._first_s: float | None = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            heard = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def ask(self, why: str) -> None:
        """Requests a stop from inside the process, as a first signal does."""
        self.requested = self.requested or why

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._first_s is not None:
            if time.monotonic() > self._first_s + GRACE_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._first_s = time.monotonic()
        self.ask(signal.Signals(number).name)
        if not self.quiet:  # not print: the signal may have interrupted a print, which is not reentrant
            text = f"\nkeyhole: {self.requested}: finishing this step and saving; once more leaves at once\n"
            with suppress(OSError):  # the terminal may be gone
                os.write(2, text.encode())
