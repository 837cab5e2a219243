"""Regular expressions of task files, with a limit on their time.

An expression such as `(a+)+$` takes time that doubles with every character. Python's engine looks for signals while it
matches, so an alarm ends it; signals are delivered to the main thread only, where tasks are read and scored.
"""

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keyhole.errors import UserError

LIMIT_S = 2.0  # for one text; a sensible expression takes microseconds


class _TooLong(Exception):
    """The time limit is over."""


def matches(pattern: str, text: str) -> list[re.Match[str]]:
    """All matches; UserError if the expression takes longer than LIMIT_S."""
    try:
        with _alarm(LIMIT_S):
            return list(re.finditer(pattern, text))
    except _TooLong:
        raise UserError(
            f"extract: `{pattern}` takes more than {LIMIT_S:g} s on a text of {len(text):,} characters: repeats in "
            "repeats, such as (a+)+, take time that doubles with every character; write it without them"
        ) from None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises _TooLong after some time, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise _TooLong

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, ring)
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, again)
        signal.signal(signal.SIGALRM, before)
