"""Hooks and forwards that a model puts into its module, and how they leave it again.

A module of its own forward holds itself: module -> forward -> closure -> module. Python frees such a loop only when its
collector happens to run, and with the module its parameters, and with these the memory of all weights. So what is put
in is written down here, and taken out when the model is closed or dropped: nothing is left but the module as
Hugging Face made it, and reference counts free it at once. The list holds modules weakly, to be no reason to live.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Patches:
    """What was put into the modules of one model."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def pre_hook(self, module: nn.Module, hook: Callable) -> None:
        """Has `hook` called before the module's forward."""
        handle: RemovableHandle = module.register_forward_pre_hook(hook)
        self._undo.append(handle.remove)

    def forward(self, module: nn.Module, forward: Callable) -> None:
        """Gives this one module another forward."""
        before, found = module.__dict__.get("forward"), weakref.ref(module)

        def undo() -> None:
            if (alive := found()) is not None:
                alive.__dict__.pop("forward", None)
                if before is not None:
                    alive.forward = before

        module.forward = forward
        self._undo.append(undo)

    def take_out(self) -> None:
        """Leaves the modules as they were; safe to call again."""
        while self._undo:
            self._undo.pop()()
