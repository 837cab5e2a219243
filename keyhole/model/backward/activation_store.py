"""Block inputs between forward and backward pass, on the device or in host memory.

Each block's input is [tokens, width]. For 32 blocks of width 4096 and 4096 tokens in 16 bit that is 1 GiB, most of what
is left on the GPU once gradients and optimizer state are gone. In host memory it costs two copies per block, which
overlap with the block's kernels: 34 MB take 0.6 ms on a fast link, the block about 10 ms.

    put       D2H copy to a pinned buffer on a side stream; the device memory is free when that copy is done
    prefetch  H2D copy to a new device tensor on the side stream, during the backward pass of the block above
    get       the compute stream waits for that copy

Pinned buffers are reused from step to step. On a CPU device tensors stay where they are.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class HostActivation:
    """A tensor in host memory, and its device copy once it is prefetched."""

    on_host: torch.Tensor
    device: torch.device
    arrived: torch.cuda.Event | None = None
    on_device: torch.Tensor | None = None


class ActivationStore:
    """Moves tensors to host memory and back. to_host=False: they stay where they are."""

    def __init__(self, device: torch.device, to_host: bool) -> None:
        self.to_host = to_host and device.type == "cuda"
        self.free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.side: Any = torch.cuda.Stream(device) if self.to_host else None

    def put(self, x: torch.Tensor) -> torch.Tensor | HostActivation:
        """Starts the D2H copy; returns x itself if to_host is False."""
        if not self.to_host:
            return x
        x = x.contiguous()
        buffers = self.free.setdefault((x.numel(), x.dtype), [])
        host = buffers.pop() if buffers else torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
        self.side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.side):
            host.copy_(x.view(-1), non_blocking=True)
        x.record_stream(self.side)
        return HostActivation(host.view(x.shape), x.device)

    def prefetch(self, stored: HostActivation) -> None:
        """Starts the H2D copy into memory of the stream that uses it; the copy waits for that stream."""
        if stored.on_device is not None:
            return
        stored.on_device = torch.empty(stored.on_host.shape, dtype=stored.on_host.dtype, device=stored.device)
        self.side.wait_stream(torch.cuda.current_stream(stored.device))
        with torch.cuda.stream(self.side):
            stored.on_device.copy_(stored.on_host, non_blocking=True)
            stored.arrived = torch.cuda.Event()
            stored.arrived.record(self.side)
        stored.on_device.record_stream(self.side)

    def get(self, stored: HostActivation, last: bool) -> torch.Tensor:
        """The tensor on the device. last: its pinned buffer may be reused."""
        self.prefetch(stored)
        assert stored.arrived is not None and stored.on_device is not None
        torch.cuda.current_stream(stored.device).wait_event(stored.arrived)
        x, stored.on_device = stored.on_device, None
        if last:
            self.free[x.numel(), x.dtype].append(stored.on_host.view(-1))
        return x
