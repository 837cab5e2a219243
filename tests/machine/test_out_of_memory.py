"""Errors that mean that memory is used up: those of the real allocators, asked for more than any machine has."""

import mmap
from collections.abc import Callable

import numpy as np
import pytest
import torch

from keyhole.errors import UserError
from keyhole.machine.out_of_memory import LOWER, MORE_ROOM, out_of_memory

TOO_MUCH = 2**50
ALLOCATORS: dict[str, tuple[Callable[[], object], str]] = {
    "torch": (lambda: torch.empty(TOO_MUCH, dtype=torch.uint8), ": 1024TiB more were asked for"),
    "mmap": (lambda: mmap.mmap(-1, TOO_MUCH), ": [Errno 12] Cannot allocate memory"),
    "numpy": (lambda: np.empty(TOO_MUCH, dtype=np.uint8), ": Unable to allocate 1.00 PiB"),
    "Python": (lambda: bytearray(TOO_MUCH), ";"),
}


@pytest.mark.parametrize("name", ALLOCATORS)
def test_every_allocator_of_the_host_is_known(name: str) -> None:
    """Also where a library has wrapped its error; the message has what was asked for, and what to do."""
    allocate, asked = ALLOCATORS[name]
    with pytest.raises((RuntimeError, OSError, MemoryError)) as caught:
        allocate()
    wrapped = ValueError("a library failed")
    wrapped.__cause__ = caught.value
    for error in (caught.value, wrapped):
        said = out_of_memory(error) or ""
        assert said.startswith(f"out of host memory{asked}") and LOWER in said and MORE_ROOM in said


def test_a_gpu_has_its_own_message_and_other_errors_have_none() -> None:
    """Threads, files and mapped libraries may be used up, too."""
    limits = {"-u": RuntimeError("can't start new thread"), "-n": OSError(24, "Too many open files")}
    limits["-v"] = ImportError("torch.so: failed to map segment from shared object")
    assert all(f"raise `ulimit {option}`" in (out_of_memory(error) or "") for option, error in limits.items())
    said = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")) or ""
    assert said.startswith("out of GPU memory: CUDA out of memory. Tried to allocate 64.00 MiB.") and LOWER in said
    refused = UserError("gpu_memory: too little")
    refused.__cause__ = MemoryError()
    others = (None, refused, RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OSError(28, "No space left"))
    assert [out_of_memory(error) for error in others] == [None] * len(others)
