"""Settings of torch and of Hugging Face that a model changes while it is open (held.py), one for the whole process.

A budget of GPU memory is a setting too. PyTorch's allocator has one limit for the process, so it is what all who share
the process may take together:

    limit   =   what others hold (tensors of the caller's, at load)   +   the budgets of the open models

A smaller budget of a second model thus does not bind the first, and when a model is closed the limit is computed anew.
While a model without a budget is open, nothing is limited: it may take what is free.
"""

import os
from functools import cache
from importlib import import_module
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.machine.gpu import accelerator
from keyhole.machine.held import Changes, Setting, attribute
from keyhole.machine.sizes import about

SEGMENTS = "expandable_segments"
SPARED = 0.05  # share of the GPU that others may hold before a budget of all of it is refused


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


class MemoryLimit(Setting):
    """The share of a GPU's memory that the process may allocate. Of each holder: its budget (None: it has none), and
    the bytes that others held when it came."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        super().__init__(
            lambda: accelerator.get_per_process_memory_fraction(device),
            lambda share: accelerator.set_per_process_memory_fraction(share, device),
        )

    @property
    def taken_bytes(self) -> int:
        """What others held, and the budgets of the open models."""
        shares = self.holders.values()
        return max((others for _, others in shares), default=0) + sum(budget or 0 for budget, _ in shares)

    @property
    def left_bytes(self) -> int:
        """The largest budget that there is room for."""
        return int(accelerator.get_device_properties(self.device).total_memory) - self.taken_bytes

    def admit(self, changes: Changes, budget: int | None) -> None:
        """Opens a model with this budget. UserError if that cannot be kept beside the others."""
        accelerator.empty_cache()
        promised = sum(budget or 0 for budget, _ in self.holders.values())
        reserved = accelerator.memory_reserved(self.device)
        changes.set(self, (budget, max(self.taken_bytes - promised, reserved - promised)))
        left, others = self.left_bytes, self.taken_bytes - promised - (budget or 0)
        if left < 0 and others + promised > SPARED * (left + self.taken_bytes):
            raise UserError(
                f"gpu_memory: {about(budget or 0)} cannot be kept: of {about(left + self.taken_bytes)} on "
                f"{self.device}, {about(promised)} are the budgets of models that are open, and {about(others)} are "
                f"held by other tensors of this process; at most {about(max(0, left + (budget or 0)))} are left. Close "
                "a model (model.close()), free tensors, or lower gpu_memory"
            )

    def wanted(self) -> Any:
        if not self.holders or any(budget is None for budget, _ in self.holders.values()):
            return self.before
        return min(self.before, self.taken_bytes / (self.left_bytes + self.taken_bytes))


@cache
def memory_limit(device: torch.device) -> MemoryLimit:
    return MemoryLimit(device)


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


def compiler(module: str, name: str) -> Setting:
    return attribute(import_module(f"{module}.config"), name)


@cache
def progress_bars() -> Setting:
    from transformers.utils import logging

    return Setting(
        logging.is_progress_bar_enabled,
        lambda on: logging.enable_progress_bar() if on else logging.disable_progress_bar(),
    )


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
