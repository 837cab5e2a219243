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
from contextlib import nullcontext
from typing import Any

import torch

from keyhole.machine.gpu import accelerator
from keyhole.offload.engine import Engine


class Downlink:
    """Copies tensors to host memory, ordered after the kernels of an engine's compute stream."""

    def __init__(self, engine: Engine, most_bytes: int | None = None) -> None:
        self.engine, self.cuda, self.most_bytes = engine, engine.cuda, most_bytes
        self.stream = accelerator.Stream(engine.device) if engine.cuda else None
        self.in_flight: deque[tuple[int, Any]] = deque()  # bytes of copies that may not have finished, and their event

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
        with accelerator.stream(self.stream) if self.cuda else nullcontext():
            for source, target in copies:
                target.copy_(source, non_blocking=self.cuda)
        if self.stream is None:
            return
        for source, _ in copies:
            source.record_stream(self.stream)
        if self.most_bytes is not None:
            self.wait_for_room(sum(source.nbytes for source, _ in copies), self.sent())

    def wait_for_room(self, size: int, event: accelerator.Event | None) -> None:
        """Copies of so many bytes were enqueued, with an event after them. Waits for the oldest ones until at most
        `most_bytes` are on their way, or these alone."""
        self.in_flight.append((size, event))
        while sum(each for each, _ in self.in_flight) > (self.most_bytes or 0) and len(self.in_flight) > 1:
            self.in_flight.popleft()[1].synchronize()

    def sent(self, and_kernels: bool = False) -> accelerator.Event | None:
        """An event that the host can wait for: every copy sent so far has finished and, with and_kernels, every kernel
        launched so far. None on a CPU."""
        if self.stream is None:
            return None
        if and_kernels:
            self.stream.wait_stream(self.engine.compute)
        event = accelerator.Event(blocking=True)
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        """Blocks the host until every copy sent so far has finished."""
        if self.stream is not None:
            self.stream.synchronize()
