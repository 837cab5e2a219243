"""Process-wide settings that a model changes while it is open, and restores when it is closed.

A setting of torch (TF32, the allocator's limit, the compiler's limits) is one value for the whole process. Several
models may change it at the same time, and may be closed in any order:

    value now   =   the value of the newest holder;   after the last holder is gone, the value before the first

If other code has changed the setting meanwhile, that value is kept. docs/process.md lists the settings.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from keyhole.machine.gpu import accelerator

SEGMENTS = "expandable_segments"


class Setting:
    """One setting: how it is read and written, and its holders with their values, newest last."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.read, self.write = read, write
        self.before: object = None
        self.ours: object = None  # the newest value, as read back (torch rounds a share to whole bytes)
        self.holders: dict[object, object] = {}

    def hold(self, holder: object, value: object) -> None:
        """Changes the setting for a holder, until let_go."""
        if not self.holders or self.read() != self.ours:  # changed by other code: earlier holders no longer count
            self.before, self.holders = self.read(), {}
        self.holders.pop(holder, None)
        self.holders[holder] = value
        self._change(value)

    def let_go(self, holder: object) -> None:
        """Restores the value of the newest remaining holder, or the value before the first."""
        was_ours = holder in self.holders and self.read() == self.ours
        self.holders.pop(holder, None)
        if was_ours:
            self._change(next(reversed(self.holders.values()), self.before))

    def _change(self, value: object) -> None:
        if self.read() != value:
            self.write(value)
        self.ours = self.read()


class Changes:
    """The settings that one model has changed."""

    def __init__(self) -> None:
        self.held: list[Setting] = []

    def set(self, setting: Setting, value: object) -> None:
        setting.hold(self, value)
        self.held.append(setting)

    def put_back(self) -> None:
        """Restores all settings; safe to call again."""
        while self.held:
            self.held.pop().let_go(self)


@cache
def matmul_precision() -> Setting:
    """Whether float32 products may run in TF32: highest or high. torch refuses to name the value if other code has set
    another one by backend (torch.backends.fp32_precision = "tf32", as Transformers does for tf32=True): then it is the
    pair of the backends' values."""
    of_cpu: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, of_cpu.matmul)  # those that the one value sets

    def read() -> str | tuple[str, ...]:
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:
            return tuple(backend.fp32_precision for backend in backends)

    def write(value: str | tuple[str, ...]) -> None:
        torch.set_float32_matmul_precision(value if isinstance(value, str) else "highest")
        if not isinstance(value, str):
            for backend, own in zip(backends, value, strict=True):
                backend.fp32_precision = own

    return Setting(read, write)


@cache
def memory_fraction(device: torch.device) -> Setting:
    """The share of a GPU's memory that the process may allocate."""
    return Setting(
        lambda: accelerator.get_per_process_memory_fraction(device),
        lambda share: accelerator.set_per_process_memory_fraction(share, device),
    )


@cache
def allocator() -> Setting:
    """PYTORCH_ALLOC_CONF. A change does not affect memory that is already reserved. PyTorch before 2.13 cannot report
    its value: there the environment's value is assumed until keyhole changes it."""
    write = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or accelerator.memory._set_allocator_settings
    known = [os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""]

    def write_all(text: str) -> None:
        if SEGMENTS not in text:  # options that the text does not mention keep their value, so mention it
            write(_joined(text, f"{SEGMENTS}:False"))
        write(text)
        known[0] = text

    return Setting(getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: known[0]), write_all)


@cache
def compiler(module: str, name: str) -> Setting:
    """A setting of the compiler: `name` in `module`.config."""
    config = import_module(f"{module}.config")
    return Setting(lambda: getattr(config, name), lambda value: setattr(config, name, value))


def expandable_segments(changes: Changes) -> None:
    """PYTORCH_ALLOC_CONF=expandable_segments:True, added to its other options. If the user has set this
    option, it is kept."""
    setting = allocator()
    users = str(setting.before if setting.holders else setting.read())
    if SEGMENTS not in users:
        changes.set(setting, _joined(users, f"{SEGMENTS}:True"))


@cache
def stream_warning() -> Setting:
    """Whether autograd warns if a gradient is computed on another stream than the one on which its parameter's node was
    made. CUDA graphs that keep autograd graphs (model/backward/recorded.py) hold the nodes of parameters, made on the
    stream of the capture, and a later eager backward pass, which waits for that stream, would warn. A version of torch
    without the setting does not warn."""
    read = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", bool)
    return Setting(read, getattr(torch._C, "_set_warn_on_accumulate_grad_stream_mismatch", lambda value: None))


def _joined(*texts: str) -> str:
    return ",".join(text for text in texts if text)
