"""Errors that mean that memory is used up, of the GPU or of the host, or another limit met: one place that knows them.

A GPU has a class of error for it. The host has none: Python and numpy raise MemoryError, torch's allocator a plain
RuntimeError, a mapped file or a new process an OSError, the loader of shared libraries an ImportError. Libraries wrap
them in errors of their own, so causes are looked at too. No torch is imported here.
"""

import errno
import re
import sys

from keyhole.errors import UserError
from keyhole.machine.sizes import about

MAPPED = re.compile(r"Cannot allocate memory|failed to map segment")
ALLOCATED = re.compile(r"DefaultCPUAllocator: (?:not enough|can't allocate) memory")
ASKED = re.compile(r"(?:allocate|mmap) (\d+) bytes")
LOWER = "lower batch_size (more gradient_accumulation_steps keep the step the same) or max_length"
MORE_ROOM = "raise `ulimit -v` or the container's limit, or end other programs"


def out_of_memory(error: BaseException | None) -> str | None:
    """If this error, or one behind it, means that memory (or files, or threads) are used up: which, how much was asked
    for, and what to do. None for all others, and for a UserError, which says by itself what to do."""
    if isinstance(error, UserError):
        return None
    torch = sys.modules.get("torch")
    while error is not None:
        if torch is not None and isinstance(error, torch.OutOfMemoryError):
            streams = "set placement=stream (in training, with a method that streams, such as zo)"
            return f"out of GPU memory: {error};\n  {LOWER}, or {streams}"
        if isinstance(error, MemoryError) or cannot_map(error) or ALLOCATED.search(str(error)):
            found, told = ASKED.search(str(error)), f": {error}" if str(error) else ""
            asked = f": {about(int(found[1]))} more were asked for, in one piece" if found else told
            return f"out of host memory{asked};\n  {LOWER}, {MORE_ROOM}"
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return f"too many files are open: raise `ulimit -n` ({error})"
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return f"no more threads are allowed: raise `ulimit -u`, or the container's limits ({error})"
        error = error.__cause__ or error.__context__
    return None


def cannot_map(error: BaseException) -> bool:
    """Whether the system had no memory, or no addresses, for a file, a library or a process."""
    return (isinstance(error, OSError) and error.errno == errno.ENOMEM) or MAPPED.search(str(error)) is not None
