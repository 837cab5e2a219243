"""What is one for the whole process, and is changed for a while: settings, attributes of classes, the right to compute.

Several models, or threads, may change the same thing at once, and may let go of it in any order:

    value now   =   the value of the newest holder;   after the last holder is gone, the value before the first

If other code has changed it meanwhile, that value is kept. Restoring goes on after an error. docs/process.md lists all
that is changed, and why. Everything here is the only way to do so: no torch is imported, and the collector uses it too.

Much of what a step relies on belongs to the process and cannot be shared: torch's flags of attention, its generators of
random numbers, its default dtype while Transformers builds a module, the receivers of gradients of compiled code, and a
capture of a CUDA graph, which no other thread may disturb. So one thread at a time is `alone`: it builds a module,
makes a step, evaluates or generates. Threads that train several models take turns, step by step, and each gets the bits
that it gets by itself; the GPU works on while they change places, since a step only launches kernels.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

_books = threading.RLock()  # of the holders of all settings
_turn: Any = threading.RLock()  # of the thread that is alone


@contextmanager
def alone() -> Iterator[None]:
    """A context, or a decorator, in which no other thread of keyhole's computes."""
    with _turn:
        yield


@contextmanager
def not_alone() -> Iterator[None]:
    """A context for code that may wait for other threads that compute: a caller's, or an exchange among ranks."""
    count = _turn._release_save() if _turn._is_owned() else None
    try:
        yield
    finally:
        if count is not None:
            _turn._acquire_restore(count)


class Setting:
    """One setting: how it is read and written, and its holders with their values, newest last."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read, self.write = read, write
        self.before: Any = None
        self.ours: object = None  # the value that was set, as read back (torch rounds a share to whole bytes)
        self.holders: dict[object, Any] = {}

    def hold(self, holder: object, value: object) -> None:
        """Changes the setting for a holder, until let_go."""
        with _books:
            if not self.holders or self.read() != self.ours:  # changed by other code: earlier holders no longer count
                self.before = self.read()
                self.holders.clear()
            self.holders.pop(holder, None)
            self.holders[holder] = value
            self._change()

    def let_go(self, holder: object) -> None:
        """Restores the value of the newest remaining holder, or the value before the first."""
        with _books:
            was_ours = holder in self.holders and self.read() == self.ours
            self.holders.pop(holder, None)
            if was_ours:
                self._change()

    @contextmanager
    def held(self, value: object) -> Iterator[None]:
        """A context with this value, or a decorator."""
        with Changes() as changes:
            changes.set(self, value)
            yield

    def wanted(self) -> Any:
        return next(reversed(self.holders.values()), self.before)

    def _change(self) -> None:
        value = self.wanted()
        if self.read() != value:
            self.write(value)
        self.ours = self.read()


class Changes(ExitStack):
    """The settings that one model has changed; `close` restores all of them, and is safe to call again."""

    def set(self, setting: Setting, value: object) -> None:
        self.callback(setting.let_go, self)
        setting.hold(self, value)


@cache
def attribute(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


@contextmanager
def in_this_thread(owner: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    """A context in which a function of a class or module is ours, for this thread alone: others get the usual one."""
    usual, here = getattr(owner, name), threading.get_ident()

    def call(*args: Any, **options: Any) -> Any:
        return (ours if threading.get_ident() == here else usual)(*args, **options)

    with alone(), attribute(owner, name).held(call):
        yield
