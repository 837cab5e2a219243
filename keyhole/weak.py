"""Hooks that do not keep their owner alive.

A parameter's hooks and an engine's callbacks live as long as the model does, and a parameter's are out of the garbage
collector's sight: a bound method among them would hold its owner, and through it the model, for good.
"""

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the bound method while its owner lives; afterwards does nothing and returns None."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = found()
        return None if alive is None else alive(*args)

    return call
