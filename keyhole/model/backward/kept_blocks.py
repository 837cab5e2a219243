"""Blocks that keep their whole graphs between forward and backward pass (activations: auto), and are not recomputed: a
quarter less work. As many as fit in the free memory: the backward pass begins with the last blocks, so their graphs are
kept for the shortest time. The first step on batches of a new size keeps none and measures its peak;

    blocks kept from the next such step on = SHARE x (limit - peak) / bytes of the activations of one block

The limit is the budget, or the free memory of the device. The bytes of one block are those of memory.py. A block gives
the same bits either way, so this choice may depend on memory. Small blocks run as CUDA graphs (recorded.py), whose
memory is their own, for every shape of batches: they keep activations as long as SPARE of the device's memory, or of
the budget beside the planned step, stays free. Within a budget, what recordings hold is not for others to keep: not
what they held when the peak was measured (of which it counts all but the temporaries in the pool of graphs), nor what
came since.
"""

import math

from keyhole.machine.gpu import ACCELERATOR, accelerator
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
