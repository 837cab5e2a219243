"""activations: auto. How many blocks can keep all their activations in the free memory.

A block whose graph is kept is not recomputed: a quarter less work. The backward pass begins with the last blocks, so
their graphs are kept for the shortest time. The first step on batches of a new size keeps none and measures its peak;

    blocks kept from the next such step on = SHARE x (limit - peak) / bytes of the activations of one block

The limit is the budget, or the free memory of the device. The bytes of one block are those of memory.py. A block gives
the same bits either way, so this choice may depend on memory.

Small blocks run as CUDA graphs (recorded.py), whose memory is their own, for every shape of batches: they keep
activations as long as SPARE of the device's memory, or of the budget beside the planned step, stays free. Within a
budget, what recordings hold is not for others to keep: not what they held when the peak was measured (of which it
counts all but the temporaries in the pool of graphs), nor what came since.
"""

import math

import torch

from keyhole.model.backward.memory import HIDDEN, WIDE
from keyhole.model.model import Model
from keyhole.model.spare_memory import SpareMemory

SHARE = 0.75  # below 1 because activations are freed and allocated in pieces
SPARE = 0.25  # of the memory stays free beside graphs that keep activations for good


class KeptBlocks:
    """Chooses the first block that keeps its graph."""

    def __init__(self, model: Model, spare: SpareMemory) -> None:
        self.model, self.spare = model, spare
        self.room: dict[int, float] = {}  # bytes beside a step on so many tokens; nan: will be known after this step
        blocks = model.layout.of_kind("block")
        wide = max((max(t.shape[-2:]) for u in blocks for t in u.tensors if len(t.shape) > 1), default=0)
        self.bytes_per_token = model.dtype.itemsize * (HIDDEN * model.layout.table.shape[1] + WIDE * wide)

    def has_room(self, tokens: int) -> bool:
        """Whether a recording of one block can keep its activations of this number of tokens."""
        if self.model.device.type != "cuda" or self.model.engine.streamed:
            return False
        _, total = torch.cuda.mem_get_info(self.model.device)
        total = total if self.spare.budget_bytes is None else self.spare.budget_bytes
        return self.spare.left() - self.bytes_per_token * tokens >= SPARE * total

    def first_kept(self, tokens: int) -> float:
        """The first block that keeps its graph in a step on this number of tokens."""
        model = self.model
        if model.device.type != "cuda" or model.engine.streamed:  # a streamed block has moved by its backward pass
            return math.inf
        if tokens not in self.room:
            self.room[tokens] = math.nan
            torch.cuda.reset_peak_memory_stats(model.device)
            return math.inf
        budget, held = self.spare.budget_bytes, self.spare.held
        if math.isnan(self.room[tokens]):
            free, _ = torch.cuda.mem_get_info(model.device)
            peak, now = torch.cuda.max_memory_allocated(model.device), torch.cuda.memory_reserved(model.device)
            limit = now + free if budget is None else min(budget, now + free)
            self.room[tokens] = limit - peak + (0 if budget is None else held.total() - held["graphs"])
        room = self.room[tokens] - (0 if budget is None else held.total())
        count = max(0, int(SHARE * room / (self.bytes_per_token * tokens)))
        return max(0, model.layout.block_count - count)
