"""Progress of long work, reported by the code that does it to a listener that may show it.

    with listening(show):                                 # code with access to the terminal
        ...
            tell("reading weights", done, total)          # code that does the work, as often as it likes

Without a listener `tell` costs a lookup. `total` may be a function, called only by a listener that shows it: counting
the rows of a file costs a pass over it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Total = int | Callable[[], int | None] | None
Listener = Callable[[str, int, Total, str], None]
_listener: ContextVar[Listener | None] = ContextVar("keyhole_progress", default=None)


def tell(what: str, done: int, total: Total = None, unit: str = "") -> None:
    """Reports that `done` of `total` are done. unit: "rows", or "bytes", which are shown as sizes."""
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total, unit)


@contextmanager
def listening(to: Listener) -> Iterator[None]:
    """Inside the context, reports go to this listener."""
    token = _listener.set(to)
    try:
        yield
    finally:
        _listener.reset(token)
