"""The accelerator: the one module that names torch.cuda. Another with streams, events and such an allocator is a change
here; where it has no Triton, kernels have their references (ops/backend.py).

PyTorch's allocator has to be told that memory is not needed any more, and that a capture of a CUDA graph has failed.
While a graph is captured, the allocator gives no cached memory back. A capture that an operation has made invalid
cannot be ended in order, and then counts as still going on: for the rest of the process neither empty_cache() nor an
allocation that finds no room would free what is cached. Its pool would count one graph too many, and keep its memory
after all of its graphs are gone.

After a failure use another pool: PyTorch's allocator of page-locked memory, which cannot be told, refuses the old one.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from keyhole.machine.collector import no_collector

accelerator = torch.cuda
ACCELERATOR = "cuda"  # the type of its devices


@contextmanager
def capturing(graph: accelerator.CUDAGraph, pool: Any, stream: accelerator.Stream) -> Iterator[None]:
    """A context whose launches are captured, on this stream and with the memory of this pool. Raises what they raise,
    or RuntimeError if they cannot be captured."""
    try:
        with accelerator.stream(stream), no_collector():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):  # it has ended in order, and the pool is released with the graph
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            torch._C._cuda_releasePool(stream.device_index, pool)
        raise


def give_back() -> None:
    """Gives back the memory that is no longer referenced. cuBLAS keeps a workspace for every stream on which a thread
    has multiplied, or a CUDA graph was captured; it would count as memory of whatever comes next."""
    if accelerator.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        accelerator.empty_cache()


def free_memory() -> None:
    """The same, after garbage that is part of a cycle was collected."""
    gc.collect()
    give_back()
