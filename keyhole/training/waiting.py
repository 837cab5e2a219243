"""Progress lines during the start of a run: on a terminal one line that changes, elsewhere a plain line now and then.

    importing torch and transformers
    tokenising: 12,288 of 67,349 rows
    reading weights: 3.1 of 12.6 GiB

The lines go to standard error, so that standard output is the same on fast and slow machines. Without a terminal,
nothing is printed about work that takes less than QUIET_S seconds, and then one line every EVERY_S. The seconds of each
phase are kept for the last line of the start block.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from keyhole.machine.progress import Total, listening
from keyhole.machine.sizes import GIB
from keyhole.machine.text import printable

QUIET_S, EVERY_S, REDRAW_S = 2.0, 10.0, 0.1
CLEAR = "\r\x1b[2K"


class Waiting:
    """The phases of one start. silent: prints nothing; stream: None is standard error."""

    def __init__(
        self, silent: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream, self.clock = None if silent else stream or sys.stderr, clock
        self.seconds: dict[str, float] = {}
        self.next_s = 0.0
        self.drawn = False

    @property
    def live(self) -> bool:
        """Whether the line can be overwritten."""
        with suppress(ValueError, OSError):  # closed
            return self.stream is not None and self.stream.isatty()
        return False

    @contextmanager
    def phase(self, name: str, now: bool = False) -> Iterator[None]:
        """A phase with this name. now: printed at once also without a terminal, since the phase reports no progress."""
        began_s = self.clock()
        self.next_s = began_s + (0.0 if self.live else QUIET_S)
        if self.live or now:
            self._show(name)
        try:
            with listening(self._tell):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - began_s
            self._clear()

    def _tell(self, what: str, done: int, total: Total, unit: str) -> None:
        now_s = self.clock()
        if self.stream is None or now_s < self.next_s:
            return
        self.next_s = now_s + (REDRAW_S if self.live else EVERY_S)
        self._show(f"{what}: {amount(done, total() if callable(total) else total, unit)}")

    def _show(self, text: str) -> None:
        if self.stream is None:
            return
        live = self.live
        with suppress(ValueError, OSError):  # closed output: nothing to report to
            self.stream.write(f"{CLEAR}{printable(text)}" if live else f"keyhole: {printable(text)}\n")
            self.stream.flush()
            self.drawn = live

    def _clear(self) -> None:
        if self.drawn and self.stream is not None:
            with suppress(ValueError, OSError):
                self.stream.write(CLEAR)
                self.stream.flush()
        self.drawn = False

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"start: {sum(self.seconds.values()):.1f} s ({parts})"


def amount(done: int, total: int | None, unit: str) -> str:
    """`12 of 30 rows`; `3.1 of 12.6 GiB`."""
    if unit == "bytes":
        return f"{done / GIB:.1f} of {total / GIB:.1f} GiB" if total else f"{done / GIB:.1f} GiB"
    of = f" of {total:,}" if total else ""
    return f"{done:,}{of} {unit}".rstrip()
