"""Reused device buffers that pages are brought into (engine.py).

A freed slot keeps its page until another needs the memory. If the page is wanted before that, and lies there as it is
at home (`intact`), it need not cross again: a sweep that turns round (forward, then reverse) finds its last pages.

    upload                     intact
    handed out to be changed   not, until it is committed: slot and home are the same again
    somebody else writes homes not: a gate (protocols.py), or whoever calls engine.invalidate

Bytes: slot_count x the largest page, on the device.
"""

from collections import deque

import torch

POISON = 0xFF  # this byte over and over is NaN in fp32, bf16, fp16 and fp8


def page_bytes(flat: torch.Tensor) -> int:
    """Of a home."""
    return flat.numel() * flat.element_size()


class Slot:
    """A reused device buffer, and the events after which it may be overwritten."""

    def __init__(self, buffer: torch.Tensor, cuda: bool) -> None:
        self.buffer = buffer
        self.page: int | None = None  # what it holds, or will
        self.last_page: int | None = None  # what lies in it, perhaps still on its way home
        self.intact = False  # it lies there as it is at home
        if cuda:
            self.ready, self.computed, self.changed = (torch.cuda.Event() for _ in range(3))

    def like(self, home: torch.Tensor) -> torch.Tensor:
        """The front of the buffer, seen as a page of this dtype and length."""
        return self.buffer[: page_bytes(home)].view(home.dtype)


class FreeSlots:
    """Slots that may take a page, longest free first."""

    def __init__(self, slots: list[Slot]) -> None:
        self.waiting: deque[Slot] = deque(slots)

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, slot: Slot) -> None:
        slot.page = None
        self.waiting.append(slot)

    def take(self, page: int, keeps: bool) -> Slot:
        """The one that has the page still, else the one that is free for longest. keeps=False: what lies in them is not
        to be trusted, now or later."""
        for slot in self.waiting:
            slot.intact = slot.intact and keeps
            if slot.intact and slot.last_page == page:
                self.waiting.remove(slot)
                return slot
        return self.waiting.popleft()
