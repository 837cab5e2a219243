"""Bytes and work of the baselines, which torch's autograd differentiates on a resident model.

On the device, per trained parameter, for weights of b bytes (galore computes in fp32):

                weights   gradients   state                                     saved
    adamw       b         b           2 b                                       2 b
    sgd         b         b           b with momentum, else 0                   the same
    galore      b         b           8 per number, rank x the longer side of a projected matrix, and 4 of projectors

Activations and gradients are not at their largest at the same time: as the backward pass goes on, the ones are freed
and the others come. So the peak of a step is the largest of

    the begin of the backward pass    what autograd saved of every block, or block inputs if activations=block; logits
                                      of LOSS_TOKENS tokens and the whole vocabulary, in b and three times in fp32 (the
                                      loss is computed in such parts, model/forward/head.py); the head's gradient
    its end                           all gradients, and one block: what it saved, and gradients in flight
                                      (model/backward/memory.py); or, if the head is tied to the embedding, the gradient
                                      of the one before it is added to that of the other
    the update                        all gradients, and a copy of all weights (adamw: the roots of its moments), or
                                      five fp32 copies of one tensor (galore: the largest is usually the embedding)

With several micro-batches gradients are there from the second on, and the first line has them too. The allocator holds
SLACK times what it hands out: 1.04 for `sgd`, 1.06 for `adamw`, 1.07 for `galore` on OPT-1.3B
(benchmarks/records/plan_check_h200_2026-11-16.json); the sweeps of other methods use expandable segments and hold less.
"""

from dataclasses import dataclass
from typing import Any

from keyhole.machine.rates import Rates
from keyhole.methods.baselines.traits import ADAMW, GALORE, SGD
from keyhole.methods.work import reverse_work, trained_numel, update_launches
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.model.backward.memory import block_numel
from keyhole.model.structure.layout import Layout

ROWS = {row.name: row for row in (ADAMW, SGD, GALORE)}
SLACK = 1.06
LOSS_TOKENS = 1024
CLIP_PASSES = 3  # over all gradients: read for the norm, read and written for the factor
ADAMW_PASSES = CLIP_PASSES + 18  # torch updates all tensors with one kind of kernel after the other: seven kinds
GALORE_BYTES = 100  # read and written per parameter by its update, which uses fp32 copies


@dataclass(frozen=True)
class TorchBytes:
    """The parts of the device peak."""

    homes: int
    gradients: int
    state: int
    activations: int
    logits: int
    block: int
    update: int
    workspace: int
    accumulated: int = 0

    @property
    def during_a_step(self) -> int:
        """The part that is free between steps."""
        begin = self.activations + self.logits + self.accumulated
        return max(begin, self.gradients + max(self.block, self.update)) + self.workspace

    @property
    def total(self) -> int:
        return int((self.homes + self.state + self.during_a_step) * SLACK)


def state_numbers(layout: Layout, work: Workload, itemsize: int) -> tuple[int, int]:
    """(number of trained parameters, bytes of their optimizer state)."""
    own: Any = work.settings or ROWS[work.method].settings()
    numel = trained_numel(layout)
    if work.method == SGD.name:
        return numel, itemsize * numel if own.momentum else 0
    if work.method == GALORE.name:
        matrices = [t.shape for u in layout.of_kind("block") for t in u.tensors if len(t.shape) == 2]
        projected = [shape for shape in matrices if min(shape) > own.rank]
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
    each = b * work.tokens * hidden if own.keeps == "block" else saved
    largest = max((t.shape.numel() for t in layout.tensors), default=0)
    return TorchBytes(
        homes=sum(room.formats.home_bytes(u) for u in layout.units if u.index not in streamed),
        gradients=b * trained,
        state=state,
        activations=int(layout.block_count * each),
        logits=min(work.tokens, LOSS_TOKENS) * int(layout.table.shape[0]) * (b + 12) + b * layout.table.shape.numel(),
        block=max(int(of_block), 0 if layout.of_kind("head") else b * layout.table.shape.numel()),
        update={GALORE.name: 20 * largest, ADAMW.name: b * trained}.get(work.method, 0),
        workspace=2 * room.workspace_bytes,
        accumulated=b * trained if work.passes > 1 else 0,
    )


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step: micro-batches are differentiated one after the other."""
    b = room.formats.dtype.itemsize
    trained, state = state_numbers(layout, work, b)
    found = reverse_work(layout, set(), work, room, rates, plain=True)
    per_weight = {GALORE.name: GALORE_BYTES, ADAMW.name: ADAMW_PASSES * b}.get(work.method, (CLIP_PASSES + 3) * b)
    moments = 0 if work.method == ADAMW.name else 2 * state
    if work.method == GALORE.name:
        found = found.plus(launches=update_launches(layout))
    return found.plus(touched=per_weight * trained + moments, saved_bytes=state)


FORMULAS = Formulas(device_bytes, step_work)
