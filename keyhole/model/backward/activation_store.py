"""What a step keeps between its passes over a block, in host memory: the second stream beside the weights.

The input of a block is [tokens, width]. For 32 blocks of width 4096 and 4096 tokens in 16 bit these are 1 GiB, most of
what is left on the GPU once gradients and optimizer state are gone. In host memory they cost a copy each way, which
overlaps with the block's kernels: 34 MB take 0.6 ms on a fast link, the block about 10 ms.

    move       D2H copy to a pinned buffer on a side stream; the device memory is free when that copy is done
    prefetch   H2D copy to a new device tensor on the side stream, while the pass before is computed
    get        the compute stream waits for that copy

A step of many passes also has, for every pass, the hidden states with which it waits for the next block, their
gradients in the backward pass, and what autograd saves behind the last block. Where the plan has no room for these
(`parks`), they wait in host memory too, and a step of any number of passes takes the device memory of one: a pass that
waits is *parked*. Its tensor stays what it is, but its storage is given back, and comes again before the pass goes on.
What was parked is the kept input of the next block at the same time, so it goes down once.

Pinned buffers are reused from step to step. With activations=auto the inputs of the last blocks stay on the device, as
many as the plan has room for: a function of the batch's shape and the budget. A CPU moves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.model.backward.memory import IN_FLIGHT, first_kept

SMALL = 2**16  # elements: what autograd saves of fewer stays on the device


@dataclass
class HostActivation:
    """A tensor in host memory, and its device copy once it is prefetched."""

    store: "ActivationStore"
    on_host: torch.Tensor
    buffer: torch.Tensor  # its memory there
    on_device: torch.Tensor | None = None
    arrived: Any = None

    def prefetch(self) -> None:
        """Starts the H2D copy into memory of the stream that uses it; the copy waits for that stream."""
        if self.on_device is None:
            self.on_device = torch.empty(self.on_host.shape, dtype=self.on_host.dtype, device=self.store.device)
            self.arrived = self.store.copy_up(self.on_host, self.on_device)

    def get(self, release: bool = False) -> torch.Tensor:
        """The tensor on the device. release: it is needed no more in host memory."""
        self.prefetch()
        self.store.wait(self.arrived)
        x, self.on_device = self.on_device, None
        assert x is not None
        if release:
            self.release()
        return x

    def release(self) -> None:
        """Its pinned buffer may be reused."""
        self.store.free.append(self.buffer)


class Parked:
    """A tensor of a pass that waits, without memory on the device until it is restored."""

    def __init__(self, store: "ActivationStore", x: torch.Tensor) -> None:
        self.store, self.x, self.nbytes, self.moved = store, x, x.nbytes, store.move(x.detach())
        self.arrived, self.is_back = None, False
        x.keyhole_moved = self.moved, x._version  # type: ignore[attr-defined]
        x.untyped_storage().resize_(0)

    def prefetch(self) -> None:
        if not self.is_back:
            self.x.untyped_storage().resize_(self.nbytes)
            self.arrived, self.is_back = self.store.copy_up(self.moved.on_host, self.x.data), True

    def restore(self) -> None:
        self.prefetch()
        self.store.wait(self.arrived)


class ActivationStore:
    """Moves tensors of a step to host memory and back. Inputs of blocks before `first_kept` wait there; `parks`: what
    passes hold between blocks, too."""

    def __init__(self, device: torch.device, may_move: bool) -> None:
        self.device, self.may_move, self.first_kept, self.parks = device, may_move, 0, False
        self.cuda = device.type == ACCELERATOR
        self.free: list[torch.Tensor] = []
        self.side: Any = accelerator.Stream(device) if self.cuda and may_move else None
        self.parked: dict[int, list[Parked]] = {}  # by pass

    def begin(self, blocks: int, each_bytes: int, room_bytes: int | None, all_move: bool, parks: bool | None) -> None:
        """A step begins, with so many bytes of inputs for each block, and room for so many of all of them (None: no
        limit). all_move: inputs of all blocks wait in host memory. parks: whether passes are parked; None: where there
        is no room for those of three blocks."""
        self.first_kept, self.parks = 0, False
        if self.may_move:
            self.first_kept = blocks if all_move else first_kept(blocks, each_bytes, room_bytes)
            tight = room_bytes is not None and room_bytes < IN_FLIGHT * each_bytes
            self.parks = self.first_kept > 0 and (tight if parks is None else parks)

    def move(self, x: torch.Tensor) -> HostActivation:
        """Starts the D2H copy, to the smallest buffer that is large enough."""
        x = x.contiguous()
        fitting = [i for i, one in enumerate(self.free) if one.nbytes >= x.nbytes]
        if fitting:
            buffer = self.free.pop(min(fitting, key=lambda i: self.free[i].nbytes))
        else:
            self.free[:1] = []  # too small, as all others
            buffer = torch.empty(x.nbytes, dtype=torch.uint8, pin_memory=self.cuda)
        host = buffer[: x.nbytes].view(x.dtype)
        if self.side is None:
            host.copy_(x.view(-1))
        else:
            self.side.wait_stream(accelerator.current_stream(x.device))
            with accelerator.stream(self.side):
                host.copy_(x.view(-1), non_blocking=True)
            x.record_stream(self.side)
        return HostActivation(self, host.view(x.shape), buffer)

    def copy_up(self, host: torch.Tensor, x: torch.Tensor) -> Any:
        """Starts the H2D copy to memory that the current stream has just allocated; returns its event."""
        if self.side is None:
            x.copy_(host)
            return None
        self.side.wait_stream(accelerator.current_stream(self.device))
        with accelerator.stream(self.side):
            x.copy_(host, non_blocking=True)
            arrived = accelerator.Event()
            arrived.record(self.side)
        x.record_stream(self.side)
        return arrived

    def wait(self, arrived: Any) -> None:
        """The current stream waits for a copy."""
        if arrived is not None:
            accelerator.current_stream(self.device).wait_event(arrived)

    def put(self, x: torch.Tensor, block: int) -> torch.Tensor | HostActivation:
        """The input of a block, moved to host memory if it is to wait there. What was parked there is there."""
        if block >= self.first_kept:
            return x.detach()
        moved, version = vars(x).pop("keyhole_moved", (None, None))  # once: another user moves it again
        return moved if moved is not None and version == x._version else self.move(x.detach())

    # -- passes that wait --------------------------------------------------------------------------------------------

    def park(self, index: int, block: int, held: Sequence[object]) -> None:
        """A pass waits for a block, which it will call with these arguments."""
        if block >= self.first_kept:
            return
        for x in held:
            whole = isinstance(x, torch.Tensor) and x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
            if isinstance(x, torch.Tensor) and whole and x.numel() >= self.smallest:
                self.parked.setdefault(index, []).append(Parked(self, x))

    @property
    def smallest(self) -> int:
        return SMALL if self.cuda else 1

    def prefetch(self, index: int) -> None:
        for parked in self.parked.get(index, ()):
            parked.prefetch()

    def restore(self, index: int) -> None:
        """The pass goes on."""
        for parked in self.parked.pop(index, ()):
            parked.restore()

    def pack(self, x: torch.Tensor) -> torch.Tensor | HostActivation:
        """What autograd saves of a pass between its blocks."""
        stays = isinstance(x, nn.Parameter) or x.device != self.device or x.numel() < self.smallest
        return x if stays or not x.is_floating_point() else self.move(x.detach())

    def unpack(self, x: torch.Tensor | HostActivation) -> torch.Tensor:
        return x.get() if isinstance(x, HostActivation) else x
