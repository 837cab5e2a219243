"""Device-to-host copies on a stream of their own.

    send(source, target)    enqueues a copy after all kernels launched so far; the host does not wait
    send_all(pairs)         the same for several, which wait for the kernels once
    sent()                  an event that fires when every copy sent so far has finished

The host launches far ahead of the device, and the memory of a source cannot be reused before its copy has finished. So
without a bound all gradients of a step may wait on the device: 6 GiB for a Llama of 3.5B whose blocks are compiled, 3
GiB eagerly (benchmarks/records/lsp_h200_2026-11-15_3.5B_d.md: 14.0 and 11.1 GiB reserved, 7.9 and 8.0 in use). With
`most_bytes` the host waits for the oldest copies first. The link is then the bound, and the copies arrive no later.

On a CPU device these are plain copies without events.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from keyhole.offload.engine import Engine

FEW = 256  # elements; smaller copies are left out of the trace


class InFlight:
    """Copies that may not have finished: at most so many bytes, or a single copy."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.copies: deque[tuple[int, Any]] = deque()

    def add(self, size: int, event: Any) -> None:
        """A copy was enqueued, with an event after it. Waits for the oldest while there are too many bytes."""
        self.copies.append((size, event))
        self.bytes += size
        while self.bytes > self.most_bytes and len(self.copies) > 1:
            oldest, event = self.copies.popleft()
            event.synchronize()
            self.bytes -= oldest


class Downlink:
    """Copies tensors to host memory, ordered after the kernels of an engine's compute stream."""

    def __init__(self, engine: Engine, most_bytes: int | None = None) -> None:
        self.engine, self.cuda = engine, engine.cuda
        self.stream = torch.cuda.Stream(engine.device) if engine.cuda else None
        self.waiting = None if most_bytes is None else InFlight(most_bytes)

    def numbers(self, count: int) -> torch.Tensor:
        """A small host tensor as the target of copies; pinned for a CUDA device."""
        return torch.zeros(count, pin_memory=self.cuda)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies after the kernels launched so far. The caller may drop the source at once; the allocator reuses its
        memory only after the copy."""
        self.send_all([(source, target)])

    def send_all(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies every source to its target, as `send` does."""
        if self.stream is not None:
            self.stream.wait_stream(self.engine.compute)
        with torch.cuda.stream(self.stream) if self.cuda else nullcontext():
            for source, target in copies:
                with self._span(source):
                    target.copy_(source, non_blocking=self.cuda)
        if self.stream is None:
            return
        for source, _ in copies:
            source.record_stream(self.stream)
        if self.waiting is not None:
            event = torch.cuda.Event(blocking=True)
            event.record(self.stream)
            self.waiting.add(sum(source.numel() * source.element_size() for source, _ in copies), event)

    def _span(self, source: torch.Tensor) -> AbstractContextManager[Any]:
        """A span of the trace; copies of a few numbers get none."""
        timeline = self.engine.timeline
        return timeline.span("gradients", "") if timeline.enabled and source.numel() > FEW else nullcontext()

    def sent(self, and_kernels: bool = False) -> Any:
        """An event that the host can wait for: every copy sent so far has finished and, with and_kernels, every kernel
        launched so far. None on a CPU."""
        if self.stream is None:
            return None
        if and_kernels:
            self.stream.wait_stream(self.engine.compute)
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        """Blocks the host until every copy sent so far has finished."""
        if self.stream is not None:
            self.stream.synchronize()
