"""When a streamed unit is written back: after every step, or after every few.

A step of zo changes every unit, so every unit would cross the link twice per step: up, and down. Both directions at
once are slower than one (an H200: 55 GB/s up alone, 39 to 51 with equal traffic down). But the host does not need the
weights of each step: updates can be recomputed (update.py). A unit that is written back every n steps is uploaded with
old weights and gets the updates that it lacks; the traffic and the cost per element:

    every step      1 up, 1 down        the fused pass
    every nth       1 up, 1 / n down    the fused pass, and (n - 1) / 2 updates more on average

Units alternate, so that each step writes back an nth of them. The other units cost GPU time, which is free only while
the GPU waits for the link. So by default we measure which share of a step it waited (offload/stalls.py):

    more than START of it                    every EVERY-th step
    less than STOP, CALM times in a row      every step again

(A step in which the host was slow, for example because a kernel was compiled, has a small share too; hence CALM.)
An expert without tokens in a step (model/forward/pieces.py) has no part in the losses, but has one in the update:
MeZO's update is of all weights. It need not be loaded for that: it lacks the update like any unit that is not written
back, and gets it when it is next used, or when it lacks UNMET of them.

The weights do not depend on this choice: the same updates are applied in the same order. Only blocks wait. Table, head
and common are written back every step, because the host reads rows of the table. So is a unit that a checkpoint waits
for.

A unit whose home several ranks share (one copy per machine) must not change while any of them uploads it. So it is
written back only in a flush, every SHARED_EVERY steps, which all ranks make together: each writes its part of the
units, while none uploads. That costs 1 / K of the model up and down per flush and rank, for K ranks.
"""

from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.offload.stalls import Stalls

EVERY = 4
SHARED_EVERY = 8
UNMET = 32
START, STOP, CALM = 0.25, 0.02, 4


class WriteBack:
    """every: steps between two write-backs of a unit; None: chosen during training."""

    def __init__(self, model: Model, every: int | None = None) -> None:
        self.engine = model.engine
        self.patient = {unit.index for unit in model.layout.of_kind("block")} & model.engine.streamed
        self.every, self.calm = every or 1, 0
        self.decides = every is None and bool(self.patient) and self.engine.cuda
        self.engine.stalls = Stalls("train" if self.decides else None)

    def begin(self) -> None:
        """Called at the beginning of a step."""
        if self.decides and (waited := self.engine.stalls.take()) is not None:
            self.learn(waited)

    def learn(self, waited: float) -> None:
        """Records the share of one step that the GPU waited."""
        self.calm = self.calm + 1 if waited < STOP else 0
        self.every = EVERY if waited > START else 1 if self.calm >= CALM else self.every

    def is_awaited(self, unit: Unit) -> bool:
        """Whether a checkpoint waits for the unit's home."""
        return self.engine.watch is not None and self.engine.watch.waits_for(unit.index)

    def is_due(self, unit: Unit, step: int, unmet: int | None = None) -> bool:
        """Whether the unit is written back with the update of this step. unmet: the number of updates that a unit lacks
        which no pass has visited, and which would have to be loaded for them."""
        if unit.index in self.engine.shared:
            return False
        if unit.index not in self.patient or self.is_awaited(unit):
            return True
        if unmet is not None and unit.expert is not None:
            return unmet >= UNMET
        return (step + unit.index) % self.every == 0

    def describe(self) -> list[str]:
        """Lines for the start block."""
        if not self.patient or (self.every == 1 and not self.decides):
            return []
        waits = f"every step, or every {EVERY} while the GPU waits more than {START:.0%} of its time for the link"
        when = waits if self.decides else f"every {self.every} steps"
        return [f"write-backs of a streamed block: {when} (same weights, less traffic)"]
