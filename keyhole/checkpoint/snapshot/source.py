"""Memory that is saved in a checkpoint, and its places in the files.

A source is a page of weights (offload/engine.py) or a tensor of the method's state, as flat memory. A page contains
tensors, or parts of them, so it has segments: elements [begin, end) belong to a tensor and are stored at an offset of a
file.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

Decode = Callable[[torch.Tensor, torch.Tensor], None]  # packed bytes, and the memory to fill
WAITING, READY, TAKEN, COPYING, COPIED, WRITING, DONE = range(7)  # see snapshot.py


@dataclass(frozen=True)
class Segment:
    """Elements [begin, end) of a source belong to this tensor, and are stored at this offset of this file."""

    tensor: str
    begin: int
    end: int
    file: str
    offset: int


@dataclass
class Source:
    """Flat memory that is written to the disk. unpacks: for a packed page, the elements and dtype that it is unpacked
    to, and the function that does it."""

    flat: torch.Tensor
    segments: list[Segment]
    unpacks: tuple[int, torch.dtype, Decode] | None = None
    state: int = READY
    event: Any = None  # after it the home has the weights to save
    copy: torch.Tensor | None = field(default=None, repr=False)
    is_read: bool = False  # a worker is reading the home

    @property
    def saved_dtype(self) -> torch.dtype:
        return self.flat.dtype if self.unpacks is None else self.unpacks[1]

    @property
    def size_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


def event_on(stream: Any) -> Any:
    """An event after all work queued on a stream; None without a stream."""
    if stream is None:
        return None
    event = torch.cuda.Event(blocking=True)  # waiting does not spin
    event.record(stream)
    return event


def segments_of(tensors: Iterable[tuple[str, int, int]], start: int, stop: int, places: dict[str, Any],
                element_bytes: int) -> list[Segment]:  # fmt: skip
    """The parts of the flat array [start, stop) that belong to tensors (name, start, stop), and their places in the
    files."""
    found = []
    for name, first, last in tensors:
        begin, end = max(start, first), min(stop, last)
        if begin < end and name in places:
            place = places[name]
            offset = place.offset + (begin - first) * element_bytes
            found.append(Segment(name, begin - start, end - start, place.file, offset))
    return found
