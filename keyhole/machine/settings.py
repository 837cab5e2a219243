"""Settings of the process that a model needs changed while it lives, and puts back when it goes.

A setting of torch (TF32, the allocator's limit, the compiler's limits) is one value for the whole process. Several
models may want it changed at the same time, and they may go in any order:

    value now   =   what the newest holder set;   after the last holder is gone, what was there before the first

If somebody else has changed the setting meanwhile, that value stays: it is no longer ours to put back.
docs/process.md lists the settings.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

SEGMENTS = "expandable_segments"


class Setting:
    """One setting: how it is read and written, and who has it changed to what, newest last."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.read, self.write = read, write
        self.before: Any = None
        self.ours: Any = None  # the newest value as it is read (of a share, torch keeps whole bytes)
        self.holders: list[tuple[object, Any]] = []

    def hold(self, holder: object, value: Any) -> None:
        """Changes the setting on behalf of a holder, until it lets go."""
        if not self.holders or self.read() != self.ours:  # somebody else's value: that of earlier holders is gone
            self.before, self.holders = self.read(), []
        self.holders = [(who, what) for who, what in self.holders if who is not holder] + [(holder, value)]
        self._change(value)

    def let_go(self, holder: object) -> None:
        """The setting becomes that of the newest holder left, or what it was before the first."""
        left = [(who, what) for who, what in self.holders if who is not holder]
        was_ours = len(left) < len(self.holders) and self.read() == self.ours
        self.holders = left
        if was_ours:
            self._change(left[-1][1] if left else self.before)

    def _change(self, value: Any) -> None:
        if self.read() != value:
            self.write(value)
        self.ours = self.read()


class Changes:
    """The settings that one model holds changed."""

    def __init__(self) -> None:
        self.held: list[Setting] = []

    def set(self, setting: Setting, value: Any) -> None:
        setting.hold(self, value)
        self.held.append(setting)

    def put_back(self) -> None:
        """Lets go of everything; safe to call again."""
        while self.held:
            self.held.pop().let_go(self)


@cache
def matmul_precision() -> Setting:
    """Whether float32 products may run in TF32: highest or high."""
    import torch

    return Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)


@cache
def memory_fraction(device: Any) -> Setting:
    """The share of a GPU's memory that the process may allocate."""
    import torch

    return Setting(
        lambda: torch.cuda.get_per_process_memory_fraction(device),
        lambda share: torch.cuda.set_per_process_memory_fraction(share, device),
    )


@cache
def allocator() -> Setting:
    """PYTORCH_ALLOC_CONF. Memory that was reserved under one value stays as it is under the next. PyTorch before 2.13
    does not say which value it has: there it is the environment's until we change it."""
    import torch

    write = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    known = [os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""]

    def write_all(text: str) -> None:
        if SEGMENTS not in text:  # what a text does not mention stays as it was, so it is mentioned first
            write(_joined(text, f"{SEGMENTS}:False"))
        write(text)
        known[0] = text

    return Setting(getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: known[0]), write_all)


@cache
def compiler(module: str, name: str) -> Setting:
    """A setting of the compiler: `name` in `module`.config."""
    from importlib import import_module

    config = import_module(f"{module}.config")
    return Setting(lambda: getattr(config, name), lambda value: setattr(config, name, value))


def expandable_segments(changes: Changes) -> None:
    """PYTORCH_ALLOC_CONF=expandable_segments:True, beside what else it says. Where it mentions them, the user has
    decided."""
    setting = allocator()
    users = setting.before if setting.holders else setting.read()
    if SEGMENTS not in users:
        changes.set(setting, _joined(users, f"{SEGMENTS}:True"))


def _joined(*texts: str) -> str:
    return ",".join(text for text in texts if text)
