"""Device-to-host copies on a stream of their own.

    send(source, target)    enqueues a copy after all kernels launched so far; the host does not wait
    sent()                  an event that fires when every copy sent so far has finished

On a CPU device these are plain copies without events.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from keyhole.offload.engine import Engine

FEW = 256  # elements; smaller copies are left out of the trace


class Downlink:
    """Copies tensors to host memory, ordered after the kernels of an engine's compute stream."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.cuda = engine, engine.cuda
        self.stream = torch.cuda.Stream(engine.device) if engine.cuda else None

    def numbers(self, count: int) -> torch.Tensor:
        """A small host tensor as the target of copies; pinned for a CUDA device."""
        return torch.zeros(count, pin_memory=self.cuda)

    def send(
        self, source: torch.Tensor, target: torch.Tensor, timed: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Copies after the kernels launched so far. The caller may drop the source at once; the allocator reuses its
        memory only after the copy. timed: makes a context around the copy."""
        span = self._span(source)
        if not self.cuda:
            with span:
                target.copy_(source)
            return
        self.stream.wait_stream(self.engine.compute)
        with torch.cuda.stream(self.stream), timed(), span:
            target.copy_(source, non_blocking=True)
        source.record_stream(self.stream)

    def _span(self, source: torch.Tensor) -> AbstractContextManager[Any]:
        """A span of the trace; copies of a few numbers get none."""
        timeline = self.engine.timeline
        return timeline.span("gradients", "") if timeline.enabled and source.numel() > FEW else nullcontext()

    def sent(self, and_kernels: bool = False) -> Any:
        """An event that the host can wait for: every copy sent so far has finished and, with and_kernels, every kernel
        launched so far. None on a CPU."""
        if not self.cuda:
            return None
        if and_kernels:
            self.stream.wait_stream(self.engine.compute)
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        """Blocks the host until every copy sent so far has finished."""
        if self.cuda:
            self.stream.synchronize()
