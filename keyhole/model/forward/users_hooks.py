"""Hooks of the user's on modules, which a replayed CUDA graph would not call.

A graph holds kernels, and no Python: a hook that was registered before the capture has run once, one that is registered
later never runs. So a block with such a hook, or any block while there is a global one, runs eagerly. Hooks of keyhole
itself (hooks.py) belong to what was captured, and Transformers' own act only if a caller asks for hidden states.

Registering or removing a hook changes the number of hooks; they are looked at only if it has changed.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

KNOWN = ("keyhole.", "transformers.utils.output_capturing")
TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UsersHooks:
    """Whether one of these modules has a hook of the user's."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables: list[dict[int, Any]] = [getattr(one, name) for one in modules for name in TABLES]
        self._tables += [getattr(torch_module, f"_global{name}") for name in TABLES]
        self._count, self._found = -1, False

    def any(self) -> bool:
        """Takes some 30 ns per module and kind of hook."""
        count = sum(map(len, self._tables))
        if count != self._count:
            hooks = [hook for table in self._tables for hook in table.values()]
            self._count, self._found = count, not all(map(is_known, hooks))
        return self._found


def is_known(hook: Any) -> bool:
    """Whether it is one of keyhole's own, or of Transformers'."""
    return (getattr(hook, "__module__", None) or "").startswith(KNOWN)
