"""Block inputs between forward and backward pass, on the device or in host memory.

Each block's input is [tokens, width]. For 32 blocks of width 4096 and 4096 tokens in 16 bit that is 1 GiB, most of what
is left on the GPU once gradients and optimizer state are gone. In host memory it costs two copies per block, which
overlap with the block's kernels: 34 MB take 0.6 ms on a fast link, the block about 10 ms.

    put       D2H copy to a pinned buffer on a side stream; the device memory is free when that copy is done
    prefetch  H2D copy to a new device tensor on the side stream, during the backward pass of the block above
    get       the compute stream waits for that copy

Pinned buffers are reused from step to step. On a CPU device tensors stay where they are. With activations=auto those of
the last blocks stay on the device, as many as the plan has room for: a function of the batch's shape and the budget.

Or (activations: auto) blocks keep their whole graphs, as many as fit in the free memory, and are not recomputed: a
quarter less work. The backward pass begins with the last blocks, so their graphs are kept for the shortest time. The
first step on batches of a new size keeps none and measures its peak;

    blocks kept from the next such step on = SHARE x (limit - peak) / bytes of the activations of one block

The limit is the budget, or the free memory of the device. The bytes of one block are those of memory.py. A block gives
the same bits either way, so this choice may depend on memory. Small blocks run as CUDA graphs (recorded.py), whose
memory is their own, for every shape of batches: they keep activations as long as SPARE of the device's memory, or of
the budget beside the planned step, stays free. Within a budget, what recordings hold is not for others to keep: not
what they held when the peak was measured (of which it counts all but the temporaries in the pool of graphs), nor what
came since.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.model.backward.memory import HIDDEN, WIDE, first_kept
from keyhole.model.model import Model
from keyhole.model.spare_memory import SpareMemory

SHARE = 0.75  # below 1 because activations are freed and allocated in pieces
SPARE = 0.25  # of the memory stays free beside graphs that keep activations for good


@dataclass
class HostActivation:
    """A tensor in host memory, and its device copy once it is prefetched."""

    store: "ActivationStore"
    on_host: torch.Tensor
    device: torch.device
    arrived: accelerator.Event | None = None
    on_device: torch.Tensor | None = None

    def prefetch(self) -> None:
        """Starts the H2D copy into memory of the stream that uses it; the copy waits for that stream."""
        if self.on_device is None:
            side = self.store.side
            self.on_device = torch.empty(self.on_host.shape, dtype=self.on_host.dtype, device=self.device)
            side.wait_stream(accelerator.current_stream(self.device))
            with accelerator.stream(side):
                self.on_device.copy_(self.on_host, non_blocking=True)
                self.arrived = accelerator.Event()
                self.arrived.record(side)
            self.on_device.record_stream(side)

    def get(self) -> torch.Tensor:
        """The tensor on the device."""
        self.prefetch()
        assert self.arrived is not None and self.on_device is not None
        accelerator.current_stream(self.device).wait_event(self.arrived)
        x, self.on_device = self.on_device, None
        return x

    def release(self) -> None:
        """Its pinned buffer may be reused."""
        self.store.free[self.on_host.numel(), self.on_host.dtype].append(self.on_host.view(-1))


class ActivationStore:
    """Moves inputs of blocks to host memory and back: of those before `first_kept`; all others stay where they are."""

    def __init__(self, device: torch.device, may_move: bool) -> None:
        self.may_move = may_move and device.type == ACCELERATOR
        self.first_kept = 0
        self.free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.side: Any = accelerator.Stream(device) if self.may_move else None

    def begin(self, blocks: int, each_bytes: int, room_bytes: int | None) -> None:
        """A step begins (memory.first_kept)."""
        self.first_kept = first_kept(blocks, each_bytes, room_bytes) if self.may_move else 0

    def put(self, x: torch.Tensor, block: int) -> torch.Tensor | HostActivation:
        """Starts the D2H copy of an input of this block; returns x itself if it stays."""
        if block >= self.first_kept:
            return x
        x = x.contiguous()
        buffers = self.free.setdefault((x.numel(), x.dtype), [])
        host = buffers.pop() if buffers else torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
        self.side.wait_stream(accelerator.current_stream(x.device))
        with accelerator.stream(self.side):
            host.copy_(x.view(-1), non_blocking=True)
        x.record_stream(self.side)
        return HostActivation(self, host.view(x.shape), x.device)


class KeptBlocks:
    """Chooses the first block that keeps its graph."""

    def __init__(self, model: Model, spare: SpareMemory) -> None:
        self.model, self.spare = model, spare
        self.room: dict[int, float] = {}  # bytes beside a step on so many tokens; nan: will be known after this step
        numel = HIDDEN * model.layout.table.shape[1] + WIDE * model.layout.widest
        self.bytes_per_token = model.dtype.itemsize * numel

    @property
    def possible(self) -> bool:  # a streamed block has moved by its backward pass
        return self.model.device.type == ACCELERATOR and not self.model.engine.streamed

    def has_room(self, tokens: int) -> bool:
        """Whether a recording of one block can keep its activations of this number of tokens."""
        if not self.possible:
            return False
        total = self.spare.budget_bytes or accelerator.mem_get_info(self.model.device)[1]
        return self.spare.left() - self.bytes_per_token * tokens >= SPARE * total

    def first_kept(self, tokens: int) -> float:
        """The first block that keeps its graph in a step on this number of tokens."""
        device, budget, held = self.model.device, self.spare.budget_bytes, self.spare.held
        if not self.possible:
            return math.inf
        if tokens not in self.room:
            self.room[tokens] = math.nan
            accelerator.reset_peak_memory_stats(device)
            return math.inf
        if math.isnan(self.room[tokens]):
            limit = accelerator.memory_reserved(device) + accelerator.mem_get_info(device)[0]
            limit = limit if budget is None else min(budget, limit) + held.total() - held["graphs"]
            self.room[tokens] = limit - accelerator.max_memory_allocated(device)
        room = self.room[tokens] - (0 if budget is None else held.total())
        count = max(0, int(SHARE * room / (self.bytes_per_token * tokens)))
        return max(0, self.model.layout.block_count - count)
