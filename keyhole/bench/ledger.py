"""Every byte that a step holds, by part: weights, gradients, optimizer state, activations.

The ledger is a dispatch mode, which sees every tensor that an operation returns. It records when the tensor's memory
was allocated and freed, on any device; an allocation that many views share counts once. `hold` tells it about memory
from before the step. The purpose of memory is known only after it was allocated: a gradient is recognised when it is
passed on (`mark`). So the parts are summed up at the end, from the whole record:

    part(t) = bytes of that part that are alive after event t           own peak   max over t
    total(t) = sum of the parts                                         peak       max over t, and the parts at that t

Memory that was not marked counts as activations: tensors that the forward keeps for the backward, and temporaries of
the operations. The ledger does not see memory that a kernel allocates and frees internally (cuBLAS's workspace), nor
the allocator's rounding; on a GPU the allocator's own peak is reported beside it, and the difference is these two.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WEIGHTS, GRADIENTS, STATE, ACTIVATIONS = PARTS = ("weights", "gradients", "state", "activations")
Bytes = dict[str, int]


@dataclass(frozen=True)
class Peaks:
    """The memory of a step: the peak of each part by itself, and all parts at the peak of their sum."""

    own: Bytes
    at_peak: Bytes

    @property
    def total(self) -> int:
        return sum(self.at_peak.values())


class Ledger(TorchDispatchMode):
    """`with Ledger(device) as ledger: step()`. Only memory of that type of device is counted."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.type
        self.events: list[tuple[int, int]] = []  # an allocation, and its bytes: negative when it was freed
        self.before: list[tuple[int, int]] = []  # allocations from before the step
        self.part_of: dict[int, str] = {}
        self.pieces: dict[int, int] = {}  # address of a live storage -> its allocation
        self.count = 0

    def hold(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        """Registers tensors that exist before the step."""
        for tensor in tensors:
            self.mark(part, tensor)

    def mark(self, part: str, tensor: torch.Tensor) -> None:
        """Assigns this tensor's memory to a part, from its allocation on."""
        if tensor.device.type == self.device:
            self.part_of[self._piece(tensor, self.before)] = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = None
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                if known is None:  # an in-place operation, or a view of memory from before the step
                    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
                    known = {x.untyped_storage()._cdata for x in inputs}
                if tensor.untyped_storage()._cdata not in known:
                    self._piece(tensor, self.events)
        return found

    def _piece(self, tensor: torch.Tensor, events: list[tuple[int, int]]) -> int:
        """The number of the tensor's allocation, recorded as new if it is unknown."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.pieces:
            self.count += 1
            self.pieces[storage._cdata] = self.count
            events.append((self.count, storage.nbytes()))
            weakref.finalize(storage, self._freed, storage._cdata, self.count, storage.nbytes()).atexit = False
        return self.pieces[storage._cdata]

    def _freed(self, address: int, piece: int, size: int) -> None:
        if self.pieces.get(address) == piece:
            del self.pieces[address]
        self.events.append((piece, -size))

    def alive(self) -> Bytes:
        """The current bytes of each part."""
        now = dict.fromkeys(PARTS, 0)
        for piece, size in [*self.before, *self.events]:
            now[self.part_of.get(piece, ACTIVATIONS)] += size
        return now

    def peaks(self) -> Peaks:
        """The peaks, from the whole record; call it after the step."""
        now, own = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
        at_peak = dict(now)
        for piece, size in [*self.before, *self.events]:
            part = self.part_of.get(piece, ACTIVATIONS)
            now[part] += size
            own[part] = max(own[part], now[part])
            if sum(now.values()) > sum(at_peak.values()):
                at_peak = dict(now)
        return Peaks(own, at_peak)
