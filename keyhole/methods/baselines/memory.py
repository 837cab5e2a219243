"""Bytes and work of the baselines, which torch's autograd differentiates on a resident model.

On the device, per trained parameter, for weights of b bytes (galore computes in fp32):

                weights   gradients   state                                     saved
    adamw       b         b           2 b                                       2 b
    sgd         b         b           b with momentum, else 0                   the same
    galore      b         b           8 per number, rank x the longer side of a projected matrix, and 4 of projectors

and the activations of the whole forward pass: what autograd saves of every block, and the gradients in flight in one
(model/backward/memory.py); with activations=block the inputs of blocks and one block; and logits of the whole vocabulary, in b
and twice in fp32. While galore updates a matrix it holds five fp32 copies of it.
"""

from dataclasses import dataclass
from typing import Any

from keyhole.machine.rates import Rates
from keyhole.methods.base import Room, Workload
from keyhole.methods.baselines.traits import ADAMW, GALORE, SGD
from keyhole.methods.work import StepWork, reverse_work, trained_numel
from keyhole.model.backward.memory import block_numel
from keyhole.model.forward.memory import ALLOCATOR_SLACK
from keyhole.model.structure.layout import Layout

ROWS = {row.name: row for row in (ADAMW, SGD, GALORE)}
GALORE_BYTES = 100  # read and written per parameter by its update, which uses fp32 copies


@dataclass(frozen=True)
class TorchBytes:
    """The parts of the device peak."""

    homes: int
    gradients: int
    state: int
    activations: int
    logits: int
    update: int
    workspace: int

    @property
    def during_a_step(self) -> int:
        """The part that is free between steps."""
        return self.gradients + max(self.activations + self.logits, self.update) + self.workspace

    @property
    def total(self) -> int:
        return int((self.homes + self.state + self.during_a_step) * ALLOCATOR_SLACK)


def _matrices(layout: Layout) -> list[Any]:
    return [t.shape for u in layout.of_kind("block") for t in u.tensors if len(t.shape) == 2]


def state_numbers(layout: Layout, work: Workload, itemsize: int) -> tuple[int, int]:
    """(number of trained parameters, bytes of their optimizer state)."""
    own = work.settings or ROWS[work.method].settings()
    numel = trained_numel(layout)
    if work.method == SGD.name:
        return numel, itemsize * numel if own.momentum else 0
    if work.method == GALORE.name:
        projected = [shape for shape in _matrices(layout) if min(shape) > own.rank]
        full = sum(shape.numel() for shape in projected)
        low = sum(own.rank * max(shape) for shape in projected)
        return numel, 8 * (numel - full + low) + 4 * own.rank * sum(min(shape) for shape in projected)
    return numel, 2 * itemsize * numel


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> TorchBytes:
    """The device peak of a step."""
    b, hidden = room.formats.dtype.itemsize, int(layout.table.shape[1])
    own = work.settings or ROWS[work.method].settings()
    trained, state = state_numbers(layout, work, b)
    of_block = b * work.tokens * block_numel(layout)
    saved = of_block if layout.counts is None else b * work.tokens * layout.counts.saved
    inputs = b * work.tokens * hidden
    kept = of_block + (layout.block_count - 1) * (inputs if getattr(own, "activations", "none") == "block" else saved)
    largest = max((shape.numel() for shape in _matrices(layout)), default=0)
    return TorchBytes(
        homes=sum(room.formats.home_bytes(u) for u in layout.units if u.index not in streamed),
        gradients=b * trained,
        state=state,
        activations=int(kept),
        logits=work.tokens * int(layout.table.shape[0]) * (2 * b + 8),
        update=20 * largest if work.method == GALORE.name else 0,
        workspace=2 * room.workspace_bytes,
    )


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step: micro-batches are differentiated one after the other."""
    b = room.formats.dtype.itemsize
    own = work.settings or ROWS[work.method].settings()
    trained, state = state_numbers(layout, work, b)
    found = reverse_work(layout, set(), work, room, rates, plain=True)
    per_weight = {GALORE.name: GALORE_BYTES}.get(work.method, 6 * b)
    return found.plus(touched=per_weight * trained + 2 * state, saved_bytes=state)
