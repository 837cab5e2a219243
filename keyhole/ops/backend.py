"""Which implementation an op runs, and why.

Every op exists twice: a plain PyTorch reference (for the CPU, and what tests compare with) and a Triton kernel. The
kernel runs when the tensors are on a CUDA device and Triton can be imported; otherwise the reference does. Both give
the same bits, so the choice is about speed alone.

Triton is optional: without it `jit` returns the function unchanged, and nothing calls it. `force()` overrides the
choice, so that a test can run both on the same inputs; under TRITON_INTERPRET=1 the kernels also run on CPU tensors,
one program after the other, in numpy.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from keyhole.machine.gpu import ACCELERATOR, accelerator

try:
    import triton
    import triton.language as tl

    TRITON_MISSING = ""
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError as error:
    TRITON_MISSING = str(error)
    INTERPRETED = False

    class tl:  # type: ignore[no-redef]  # where there is no such module
        """Stands in for triton.language, whose names modules use at import."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value


_forced: str | None = None


def jit(**options: Any) -> Callable[..., Any]:
    """`triton.jit(**options)` where Triton exists; the bare function elsewhere."""
    return (lambda fn: fn) if TRITON_MISSING else triton.jit(**options)


@contextmanager
def force(choice: str | None) -> Iterator[None]:
    """Within this context every op runs "kernel" or "reference" (None: choose by device again)."""
    global _forced
    before, _forced = _forced, choice
    try:
        yield
    finally:
        _forced = before


def use_kernel(device: torch.device) -> bool:
    """Whether ops on tensors of this device run the Triton kernel."""
    return (device.type == ACCELERATOR and not TRITON_MISSING) if _forced is None else _forced == "kernel"


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current one, on which Triton launches."""
    return accelerator.device(tensor.device) if tensor.is_cuda else nullcontext()


def describe() -> str:
    if _forced is not None:
        return f"ops: {_forced}, forced"
    if TRITON_MISSING:
        return f"ops: PyTorch reference on every device, because Triton is missing ({TRITON_MISSING})"
    if not accelerator.is_available():
        return f"ops: PyTorch reference, because there is no CUDA device (Triton is {triton.__version__})"
    how = "interpreted" if INTERPRETED else "compiled"
    return f"ops: Triton {triton.__version__} kernels ({how}) on CUDA, PyTorch reference on the CPU"


@jit()
def load(ptr, mask, MASKED: tl.constexpr):
    """Loads; 0 outside of the mask."""
    if MASKED:
        x = tl.load(ptr, mask, other=0)
    else:
        x = tl.load(ptr)
    return x


@jit()
def store(ptr, x, mask, MASKED: tl.constexpr):
    """Stores within the mask."""
    if MASKED:
        tl.store(ptr, x, mask)
    else:
        tl.store(ptr, x)
