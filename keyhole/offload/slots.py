"""Reused device buffers into which the engine uploads pages (engine.py).

A freed slot keeps its page until another page needs the memory. If the same page is acquired before that, and the slot
still equals the home (`intact`), no upload is needed: a sweep that changes direction (forward, then reverse) finds its
last pages in their slots. A slot is

    intact        after an upload, and after a commit: slot and home are equal
    not intact    while its page is acquired for a change; and when other code writes homes: a gate (engine.py), or
                  the caller of engine.invalidate

Bytes: slot_count x the largest page, on the device.

Memory of one stream that other streams use is *lent*. PyTorch's allocator gives out memory by stream: what the compute
stream frees, it gets again at once, because its kernels run in order. Other streams are not part of that order. A
buffer that copies use on another stream can therefore be overwritten twice:

    at its start   kernels of the memory's previous owner are still queued on the compute stream,
                   and write into it after the first copy
    at its end     it is freed while a copy into it is still queued (a model is dropped while units are
                   uploaded), and the copy writes into the memory of its next owner
"""

from collections import deque
from collections.abc import Iterable

import torch

from keyhole.machine.gpu import accelerator

POISON = 0xFF  # this byte, repeated, is NaN in fp32, bf16, fp16 and fp8 (model/weights/format.py)


class Slot:
    """A reused device buffer, and the events after which it may be overwritten."""

    def __init__(self, buffer: torch.Tensor, cuda: bool) -> None:
        self.use(buffer)
        self.page: int | None = None  # the page that the slot is reserved for; None: the slot is free
        self.last_page: int | None = None  # the page whose bytes it holds; their write-back may still be running
        self.intact = False  # these bytes equal the home's
        if cuda:
            self.ready, self.computed, self.changed = (accelerator.Event() for _ in range(3))

    def use(self, buffer: torch.Tensor) -> None:
        """Sets the memory of the slot."""
        self.buffer = buffer
        self.views: dict[tuple[torch.dtype, int], torch.Tensor] = {}  # of the buffer; units of one kind are alike

    def as_page(self, home: torch.Tensor) -> torch.Tensor:
        """The first bytes of the buffer, viewed with the dtype and length of a home."""
        key = home.dtype, home.numel()
        page = self.views.get(key)
        if page is None:
            with torch.inference_mode(False):  # an evaluation may be the first to use it, and a step changes it
                page = self.views[key] = self.buffer[: home.nbytes].view(home.dtype)
        return page


class FreeSlots:
    """Slots that may take a page, in the order in which they became free."""

    def __init__(self, slots: list[Slot]) -> None:
        self.waiting: deque[Slot] = deque(slots)

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, slot: Slot) -> None:
        slot.page = None
        self.waiting.append(slot)

    def take(self, page: int, reuse: bool) -> Slot:
        """The slot that still holds the page, else the one that has been free longest. reuse=False: the contents of
        free slots may differ from the homes and are not used."""
        for slot in self.waiting:
            slot.intact = slot.intact and reuse
            if slot.intact and slot.last_page == page:
                self.waiting.remove(slot)
                return slot
        return self.waiting.popleft()


def lend(buffer: torch.Tensor, streams: "Iterable[accelerator.Stream]") -> torch.Tensor:
    """Lends a new buffer of the current stream to other streams: they wait for what is queued now, and the allocator
    gives the memory to nobody else before they are done with it. Returns the buffer."""
    current = accelerator.current_stream(buffer.device)
    for stream in streams:
        stream.wait_stream(current)
        buffer.record_stream(stream)
    return buffer
