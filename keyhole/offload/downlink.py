"""The way down: copies from the device to host memory, on a stream of their own.

    send(source, target)    queued behind the kernels so far; the host does not wait
    sent()                  an event: everything sent so far has arrived

On a CPU device the same with plain copies, and no events.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from keyhole.offload.engine import Engine

FEW = 256  # numbers


class Downlink:
    """Copies of tensors to host memory, behind the kernels of an engine's compute stream."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.cuda = engine, engine.cuda
        self.stream = torch.cuda.Stream(engine.device) if engine.cuda else None

    def numbers(self, count: int) -> torch.Tensor:
        """A few numbers on the host that can be sent to."""
        return torch.zeros(count, pin_memory=self.cuda)

    def send(
        self, source: torch.Tensor, target: torch.Tensor, timed: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Copies after the kernels so far. The source may be dropped at once; its memory is used again behind the copy.
        timed: makes a context around the copy."""
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
        """For a trace of the step; a few numbers are not worth a span."""
        timeline = self.engine.timeline
        return timeline.span("gradients", "") if timeline.enabled and source.numel() > FEW else nullcontext()

    def sent(self, and_kernels: bool = False) -> Any:
        """An event that the host can wait for: everything sent so far has arrived; and_kernels: and the kernels so far
        are done. None on a CPU."""
        if not self.cuda:
            return None
        if and_kernels:
            self.stream.wait_stream(self.engine.compute)
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        """Blocks the host until everything sent has arrived."""
        if self.cuda:
            self.stream.synchronize()
