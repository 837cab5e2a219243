"""Block inputs between forward and reverse, on the device or in host memory.

Each block's input is [tokens, width]: for 32 blocks of width 4096 and 4096 tokens in 16 bit 1 GiB, and that fills a
GPU once gradients and optimizer state are gone. In host memory it costs two copies a block, which hide behind the
block's own work: 34 MB take 0.6 ms on a fast link, the block some 10 ms.

    put       compute stream -> side stream -> pinned buffer; the device copy is free as soon as the side stream is done
    prefetch  pinned buffer -> a new device tensor, on the side stream, while the block above is being differentiated
    get       the compute stream waits for that copy

Pinned buffers are kept from step to step. On a CPU there is no other memory to go to: put and get do nothing.
"""

from dataclasses import dataclass

import torch


@dataclass
class Kept:
    """A tensor put away: where it is, and its device copy when it is on its way back."""

    on_host: torch.Tensor
    device: torch.device
    arrived: torch.cuda.Event | None = None
    on_device: torch.Tensor | None = None


class Keeper:
    """Puts tensors away and brings them back. to_host=False: they stay where they are."""

    def __init__(self, device: torch.device, to_host: bool) -> None:
        self.to_host = to_host and device.type == "cuda"
        self.free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.side = torch.cuda.Stream(device) if self.to_host else None

    def put(self, x: torch.Tensor) -> "torch.Tensor | Kept":
        if not self.to_host:
            return x
        x = x.contiguous()
        buffers = self.free.setdefault((x.numel(), x.dtype), [])
        host = buffers.pop() if buffers else torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
        self.side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.side):
            host.copy_(x.view(-1), non_blocking=True)
        x.record_stream(self.side)
        return Kept(host.view(x.shape), x.device)

    def prefetch(self, kept: Kept) -> None:
        """Starts the way back. The copy's memory comes from the stream it is used on, which the copy waits for."""
        if kept.on_device is not None:
            return
        kept.on_device = torch.empty(kept.on_host.shape, dtype=kept.on_host.dtype, device=kept.device)
        self.side.wait_stream(torch.cuda.current_stream(kept.device))
        with torch.cuda.stream(self.side):
            kept.on_device.copy_(kept.on_host, non_blocking=True)
            kept.arrived = torch.cuda.Event()
            kept.arrived.record(self.side)
        kept.on_device.record_stream(self.side)

    def get(self, kept: Kept, last: bool) -> torch.Tensor:
        """The tensor on the device; last: its buffer may be used for another."""
        self.prefetch(kept)
        torch.cuda.current_stream(kept.device).wait_event(kept.arrived)
        x, kept.on_device = kept.on_device, None
        if last:
            self.free[x.numel(), x.dtype].append(kept.on_host.view(-1))
        return x
