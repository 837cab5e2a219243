"""Hooks and forwards that a model installs in its module, and their removal.

A module with its own forward is a reference cycle: module -> forward -> closure -> module. Python frees a cycle only
when the garbage collector runs, and until then the parameters keep the memory of all weights. So every patch is
recorded here and removed when the model is closed or deleted: the module is then as Hugging Face made it, and reference
counting frees it at once. The list holds weak references to modules.
"""

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Patches:
    """The patches in the modules of one model."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def pre_hook(self, module: nn.Module, hook: Callable) -> None:
        """Calls `hook` before the module's forward."""
        handle: RemovableHandle = module.register_forward_pre_hook(hook)
        self._undo.append(handle.remove)

    def before_saving(self, module: nn.Module, hook: Callable[[], None]) -> None:
        """Calls `hook` before the module's own save_pretrained, unless that is given the tensors to save."""
        if not hasattr(type(module), "save_pretrained"):
            return
        found: Callable[[], Any] = weakref.ref(module)
        own: Any = type(module)

        @wraps(own.save_pretrained)
        def save_pretrained(*args: Any, **options: Any) -> Any:
            if options.get("state_dict") is None:
                hook()
            return type(found()).save_pretrained(found(), *args, **options)

        def undo() -> None:
            if (alive := found()) is not None:
                alive.__dict__.pop("save_pretrained", None)

        module.save_pretrained = save_pretrained  # type: ignore[assignment]
        self._undo.append(undo)

    def before_state_dict(self, module: nn.Module, hook: Callable[[], None]) -> None:
        """Calls `hook` before the state_dict of the module or of any module in it, once, and before its
        load_state_dict."""
        handles: list[RemovableHandle] = [
            one.register_state_dict_pre_hook(lambda *args: None if _is_nested() else hook()) for one in module.modules()
        ]
        handles.append(module.register_load_state_dict_pre_hook(lambda *args: hook()))
        self._undo += [handle.remove for handle in handles]

    def forward(self, module: nn.Module, forward: Callable) -> None:
        """Replaces the forward of this one module."""
        before, found = module.__dict__.get("forward"), weakref.ref(module)

        def undo() -> None:
            if (alive := found()) is not None:
                alive.__dict__.pop("forward", None)
                if before is not None:
                    alive.forward = before

        module.forward = forward
        self._undo.append(undo)

    def take_out(self) -> None:
        """Removes all patches; safe to call again."""
        while self._undo:
            self._undo.pop()()


def _is_nested() -> bool:
    """Called in a hook: whether that state_dict was called by the state_dict of a module around it."""
    called = sys._getframe(2)
    return called.f_back is not None and called.f_back.f_code is called.f_code
