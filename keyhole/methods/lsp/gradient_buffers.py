"""Device buffers in which gradients are accumulated: a few buffers, allocated once, for all units.

    assign_places(targets)   assigns every target its place in the buffers of its unit
    Share                    this rank's part of these numbers: all, or one of several equal parts
    buffers.of(unit)         the unit's buffer, the same until it is done
    buffers.done(*units)     their last reader has been enqueued (on `stream`, else on the compute stream)

The units of a block are placed side by side in one buffer, because the backward pass hands over the gradients of a
whole block in any order before it finishes a unit. A buffer is as long as the longest such group. One buffer is enough
if the kernels that fill it also consume it. If gradients are copied to the host, there are two buffers, and the kernels
wait on the device for the copy of the group before the last. (A block that is used again later in the backward pass
keeps its buffer until then, and another buffer is allocated.)
"""

from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.methods.lsp.target import Target

Targets = dict[int, list[Target]]  # by unit
ALIGN = 64  # elements


@dataclass(frozen=True)
class Share:
    """The part of every unit's numbers that this rank's optimizer has: one of `size` adjacent equal parts."""

    rank: int = 0
    size: int = 1

    def numel(self, length: int) -> int:
        """Numbers in this part, for a unit of `length` numbers."""
        return length // self.size

    def range_of(self, target: Target, numel: int) -> tuple[int, int]:
        """[begin, end) of the target in this rank's part of `numel` numbers; may be empty."""
        first = target.begin - self.rank * numel
        return min(max(first, 0), numel), min(max(first + target.numel, 0), numel)

    def view_in(self, flat: torch.Tensor, target: Target) -> torch.Tensor:
        """The target's numbers in this rank's part of the unit: all of them in their shape, or some, flat."""
        if self.size == 1:
            return view_in(flat, target)
        begin, end = self.range_of(target, flat.numel())
        return flat[begin:end]

    def has(self, target: Target, flat: torch.Tensor) -> bool:
        """Whether any of the target's numbers are in this part."""
        begin, end = self.range_of(target, flat.numel())
        return begin < end

    def first_in(self, target: Target, numel: int) -> int:
        """The index in the target of the first number of this part."""
        return min(max(self.rank * numel - target.begin, 0), target.numel)


ALL = Share()


def assign_places(targets: Targets, share: Share = ALL) -> dict[int, int]:
    """Assigns every target its place in the buffers of its unit; returns the lengths of the buffers, which can be cut
    into equal parts."""
    lengths = {}
    for unit, members in targets.items():
        end = 0
        for target in members:
            target.begin, end = end, end + -(-target.numel // ALIGN) * ALIGN
        lengths[unit] = -(-end // (share.size * ALIGN)) * ALIGN * share.size
    return lengths


def view_in(flat: torch.Tensor, target: Target) -> torch.Tensor:
    """The target's slice of a buffer of its unit."""
    return flat[target.begin : target.begin + target.numel].view(target.shape)


@dataclass
class _Buffer:
    flat: torch.Tensor
    read: Any = None  # a CUDA event after the last read on another stream
    units: set[int] = field(default_factory=set)  # units in this buffer that are not done


class GradientBuffers:
    """The buffers, one per group of units at a time. groups: unit -> its group; waiting: makes a context for waits."""

    def __init__(
        self,
        lengths: dict[int, int],
        groups: dict[int, Hashable],
        device: torch.device,
        count: int,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.lengths, self.groups, self.device, self.waiting = lengths, groups, device, waiting
        self.begins: dict[int, int] = {}
        sizes: dict[Hashable, int] = {}
        for unit, numel in lengths.items():
            self.begins[unit] = sizes.get(groups[unit], 0)
            sizes[groups[unit]] = self.begins[unit] + numel
        self.numel = max(sizes.values(), default=0)
        self.free = deque(_Buffer(torch.empty(self.numel, device=device)) for _ in range(count))
        self.open: dict[Hashable, _Buffer] = {}

    def of(self, unit: int) -> torch.Tensor:
        """The buffer in which the unit's gradient is accumulated."""
        group = self.groups[unit]
        if group not in self.open:
            self.open[group] = self._take()
        buffer = self.open[group]
        buffer.units.add(unit)
        return buffer.flat[self.begins[unit] : self.begins[unit] + self.lengths[unit]]

    def _take(self) -> _Buffer:
        if not self.free:
            return _Buffer(torch.empty(self.numel, device=self.device))
        buffer = self.free.popleft()
        if buffer.read is not None:
            with self.waiting():
                torch.cuda.current_stream(self.device).wait_event(buffer.read)
            buffer.read = None
        return buffer

    def done(self, *units: int, stream: Any = None) -> None:
        """Gradients of these units, of one group, have been used, or will have been when the stream reaches this
        point."""
        group = self.groups[units[0]]
        buffer = self.open[group]
        buffer.units.difference_update(units)
        if stream is not None:
            buffer.read = torch.cuda.Event()
            buffer.read.record(stream)
        if not buffer.units:
            self.free.append(self.open.pop(group))
