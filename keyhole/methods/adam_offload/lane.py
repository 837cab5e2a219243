"""Sends host tensors through the device in chunks: copied in, changed there, and copied back.

The device can also update optimizer state that is kept in host memory, if the state crosses the link both ways. Several
tensors of one length go in together, chunk after chunk, through a ring of slots:

    up     waits for: the slot's last copy back;   then copies a chunk of every tensor in
    work   waits for: that;                        then change(begin, chunks)
    down   waits for: that;                        then copies the chunks back

The three streams are ordered by events alone, so one chunk is copied in, one is changed and one is copied back at the
same time, and the next range begins while the last one is still being copied back. The host waits only when the
function returned by `run` is called. Bytes on the device: SLOTS x chunk x the bytes of one element of every tensor. On
a CPU device the same runs with plain copies.
"""

from collections.abc import Callable
from typing import Any

import torch

from keyhole.offload.lending import lend

SLOTS = 3
CHUNK = 4 * 2**20  # elements: 16 MiB of fp32, enough for a copy to run at the link's rate


def chunk_of(numel: int) -> int:
    """Elements per chunk for ranges of at most this many."""
    return min(CHUNK, numel)


class _Slot:
    def __init__(self, dtypes: list[torch.dtype], chunk: int, device: torch.device) -> None:
        self.buffers = [torch.empty(chunk, dtype=dtype, device=device) for dtype in dtypes]
        if device.type == "cuda":
            self.arrived, self.changed, self.left = (torch.cuda.Event() for _ in range(3))


class Lane:
    """A ring of slots on the device for host tensors. dtypes: of the tensors. Only one thread may use it at a time."""

    def __init__(self, dtypes: list[torch.dtype], device: torch.device, chunk: int = CHUNK) -> None:
        self.device, self.chunk, self.cuda = device, chunk, device.type == "cuda"
        self.slots = [_Slot(dtypes, chunk, device) for _ in range(SLOTS)]
        self.turn = 0
        if self.cuda:
            self.up, self.work, self.down = streams = [torch.cuda.Stream(device) for _ in range(3)]
            for buffer in (buffer for slot in self.slots for buffer in slot.buffers):
                lend(buffer, streams)

    def run(
        self, tensors: list[torch.Tensor], back: int, change: Callable[[int, list[torch.Tensor]], None]
    ) -> Callable[[], None]:
        """Sends flat host tensors through the device. change(begin, chunks) enqueues kernels on the chunks at `begin`;
        the first `back` tensors are copied back. Returns at once a function that blocks until all of it is done."""
        numel = tensors[0].numel()
        for begin in range(0, numel, self.chunk):
            slot = self.slots[self.turn % SLOTS]
            self.turn += 1
            homes = [flat[begin : begin + self.chunk] for flat in tensors]
            chunks = [b[: home.numel()] for b, home in zip(slot.buffers, homes, strict=True)]
            (self._pass if self.cuda else self._pass_on_cpu)(slot, homes, chunks, back, begin, change)
        if not self.cuda:
            return lambda: None
        end = torch.cuda.Event(blocking=True)
        end.record(self.down)
        return end.synchronize

    def _pass(self, slot: _Slot, homes: list, chunks: list, back: int, begin: int, change: Callable) -> None:
        with torch.cuda.stream(self.up):
            self.up.wait_event(slot.left)
            _copy(homes, chunks)
            slot.arrived.record(self.up)
        with torch.cuda.stream(self.work):
            self.work.wait_event(slot.arrived)
            change(begin, chunks)
            slot.changed.record(self.work)
        with torch.cuda.stream(self.down):
            self.down.wait_event(slot.changed)
            _copy(chunks[:back], homes[:back])
            slot.left.record(self.down)

    def _pass_on_cpu(self, slot: Any, homes: list, chunks: list, back: int, begin: int, change: Callable) -> None:
        _copy(homes, chunks)
        change(begin, chunks)
        _copy(chunks[:back], homes[:back])


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
