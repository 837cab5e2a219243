"""What does not keep a model alive: hooks, errors, and what is left of it when it is closed.

A parameter's hooks and an engine's callbacks live as long as the model does, and a parameter's are out of the garbage
collector's sight: a bound method among them would hold its owner, and through it the model, for good.

An error keeps the frames of all calls that it has ended, with their local variables, for as long as somebody keeps the
error: a notebook, a debugger and pytest keep the last one. In the frames of a step are the model and gigabytes of
activations. So the functions that users call clear them, down from their own.

A model that is closed, and a method of it, has no attribute left, so whoever still has it keeps nothing alive.
"""

import sys
import traceback
import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from keyhole.errors import Closed

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the bound method while its owner lives; afterwards does nothing and returns None."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = found()
        return None if alive is None else alive(*args)

    return call


def leaves_no_frames(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: an error that comes out of the function keeps no local variable of it, nor of what it has called."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        outside = sys.exc_info()[1]  # the caller may be handling an error, whose frames are the caller's
        try:
            return function(*args, **options)
        except BaseException as error:
            forget_frames(error, outside)
            del args, options
            raise

    return call


def forget_frames(error: BaseException | None, until: BaseException | None = None) -> None:
    """Clears the frames of calls that an error has ended, and of the errors behind it but for `until`."""
    while error is not None and error is not until:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Closable:
    """What is closed by `vars(self).clear()`: whatever it is called for afterwards, it is refused."""

    if not TYPE_CHECKING:  # a type checker finds misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") if vars(self) else Closed
