"""Copies host memory with several threads, because one core copies more slowly than the GPU's steps change weights.

A page must be copied before its next change is queued, and training waits meanwhile. 400 MB every 45 ms (a 6.7B model,
16 x 2048 tokens) need 9 GB/s; one core reaches 3 to 5, including the allocation of fresh memory pages.

torch's own threads cannot be used: training is pinned to one core while it launches kernels
(model/forward/lockstep.py), and a thread team that is created there stays on that core. These threads are created
before. numpy's copy releases the GIL.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from keyhole.machine.host import cpu_count

COPY_THREADS = 8
SMALL_BYTES = 2**20  # smaller copies are not divided


class CopyThreads:
    """Threads that copy; they are started by the constructor, on the cores that the caller may use."""

    def __init__(self, count: int | None = None) -> None:
        count = min(COPY_THREADS, cpu_count()) if count is None else count
        self.count = count
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="keyhole-copy")
        together = threading.Barrier(count)
        list(self.pool.map(lambda _: together.wait(), range(count)))  # starts all threads: a pool starts them lazily

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies source to target: flat host tensors of one dtype and length."""
        into, out_of = (flat.view(torch.uint8).numpy() for flat in (target, source))
        parts = self.count if len(into) > SMALL_BYTES else 1
        cuts = [len(into) * i // parts for i in range(parts + 1)]
        spans = [slice(begin, end) for begin, end in zip(cuts, cuts[1:], strict=False)]
        list(self.pool.map(lambda at: np.copyto(into[at], out_of[at]), spans))
