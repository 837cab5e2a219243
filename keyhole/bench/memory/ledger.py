"""Every byte that a step holds, by part: weights, gradients, optimizer state, activations.

The ledger stands between PyTorch and its kernels (a dispatch mode) and sees every tensor that an operation returns. It
writes down when its memory came to be and when it was freed, on any device; one allocation that many views share counts
once. What was there before the step is told to it (hold). What a piece of memory was for is known later than it was
made: a gradient is one when it is handed over (mark). So the parts are added up at the end, from the whole record:

    part(t) = bytes of that part that are alive after event t           own peak   max over t
    total(t) = sum of the parts                                         peak       max over t, and the parts at that t

What no one has claimed is an activation: what the forward keeps for the backward, and what the operations hold between
them. Not seen: what a kernel takes for itself and gives back before it returns (cuBLAS's workspace), and the rounding
of the allocator; on a GPU the allocator's own peak is reported beside, and the difference is that.
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
    """What a step held: the peak of each part by itself, and all parts at the peak of their sum."""

    own: Bytes
    at_peak: Bytes

    @property
    def total(self) -> int:
        return sum(self.at_peak.values())


class Ledger(TorchDispatchMode):
    """`with Ledger(device) as ledger: step()`. Only memory of that type of device is counted."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device.type
        self.events: list[tuple[int, int]] = []  # a piece of memory, and its bytes: negative when it was freed
        self.before: list[tuple[int, int]] = []  # those that were there when the step began
        self.part_of: dict[int, str] = {}
        self.pieces: dict[int, int] = {}  # address of a living storage -> its piece
        self.count = 0

    def hold(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that exist before the step."""
        for tensor in tensors:
            self.mark(part, tensor)

    def mark(self, part: str, tensor: torch.Tensor) -> None:
        """This tensor's memory is of that part, and was so from the beginning."""
        if tensor.device.type == self.device:
            self.part_of[self._piece(tensor, self.before)] = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = None
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                if known is None:  # an operation in place, or a view of what was there before the step
                    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
                    known = {x.untyped_storage()._cdata for x in inputs}
                if tensor.untyped_storage()._cdata not in known:
                    self._piece(tensor, self.events)
        return found

    def _piece(self, tensor: torch.Tensor, events: list[tuple[int, int]]) -> int:
        """The number of the tensor's memory, written down as new where it is not known."""
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
        """What the parts hold now."""
        now = dict.fromkeys(PARTS, 0)
        for piece, size in [*self.before, *self.events]:
            now[self.part_of.get(piece, ACTIVATIONS)] += size
        return now

    def peaks(self) -> Peaks:
        """From the whole record; call it after the step."""
        now, own = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
        at_peak = dict(now)
        for piece, size in [*self.before, *self.events]:
            part = self.part_of.get(piece, ACTIVATIONS)
            now[part] += size
            own[part] = max(own[part], now[part])
            if sum(now.values()) > sum(at_peak.values()):
                at_peak = dict(now)
        return Peaks(own, at_peak)
