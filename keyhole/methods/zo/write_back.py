"""When a streamed unit goes home: after every step, or after every few.

A step of zo changes every unit, so every unit would cross the link twice per step: up, and down. Both ways at once are
slower than one (an H200: 55 GB/s up alone, 39 to 51 while the same comes down). But the host does not need the weights
of each step: updates can be made again (update.py). A unit that stays away for n steps comes up as it was and gets n
updates; the bytes, and the costs per element:

    every step      1 up, 1 down        the fused pass
    every nth       1 up, 1 / n down    the fused pass, and (n - 1) / 2 updates more on average

Units take turns, so that each step writes an nth of them. The others pay with GPU time, which is free only while the
GPU waits for the link; so unless told otherwise we look at how much of a step it waited (offload/stalls.py):

    more than START of it                    every EVERY-th step
    less than STOP, CALM times on end        every step again

(A step in which the host was slow, because a kernel was compiled, say, is a calm one too: it is no reason.)
An expert that no token of a step met (model/forward/experts.py) has no part in the losses, but in the update: MeZO's is
that of all weights. It need not come for that: it is owed the update like any unit that stays away, and gets it when it
is next met, or when it is owed UNMET of them. (An update of a unit on the GPU takes a twentieth to a fiftieth of the
time that the unit takes over the link, up and down.)

Which one it is never shows in the weights: the same updates are applied in the same order. Only blocks wait. Table,
head and spine go home every step: the table is read by rows on the host. So does a unit that a checkpoint waits for.

A unit whose home several ranks share (one copy per machine) must not change while any of them uploads it. So it goes
home only in a flush, every SHARED_EVERY steps, which all ranks make together: each writes its part of the units, while
nobody uploads. That costs 1 / K of the model up and down per flush and rank, for K ranks.
"""

from keyhole.errors import UserError
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.offload.stalls import Stalls

EVERY = 4
SHARED_EVERY = 8
UNMET = 32
START, STOP, CALM = 0.25, 0.02, 4


class WriteBack:
    """every: steps between two write-backs of a unit; None: decided while training."""

    def __init__(self, model: Model, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise UserError(f"zo: write_back_every {every} must be at least 1, or None to let the GPU's waits decide")
        self.engine = model.engine
        self.patient = {unit.index for unit in model.layout.of_kind("block")} & model.engine.streamed
        self.every, self.calm = every or 1, 0
        self.decides = every is None and bool(self.patient) and self.engine.cuda
        self.engine.stalls = Stalls("train" if self.decides else None)

    def begin(self) -> None:
        """A step begins."""
        waited = self.engine.stalls.take() if self.decides else None
        if waited is not None:
            self.learn(waited)

    def learn(self, waited: float) -> None:
        """Of one step, the GPU waited for this share."""
        self.calm = self.calm + 1 if waited < STOP else 0
        if waited > START:
            self.every = EVERY
        elif self.calm >= CALM:
            self.every = 1

    def may_wait(self, unit: Unit) -> bool:
        return unit.index in self.patient

    def is_awaited(self, unit: Unit) -> bool:
        """Whether somebody waits for the unit to come home."""
        return self.engine.watch is not None and self.engine.watch.waits_for(unit.index)

    def is_due(self, unit: Unit, step: int) -> bool:
        """Whether the unit is to go home with the update of this step."""
        if unit.index in self.engine.shared:
            return False
        if not self.may_wait(unit) or self.is_awaited(unit):
            return True
        return (step + unit.index) % self.every == 0

    def brings(self, unit: Unit, step: int, owed: int) -> bool:
        """Whether a unit that was not visited in a step comes for the updates that it is owed."""
        if unit.expert is None or not self.may_wait(unit) or self.is_awaited(unit):
            return self.is_due(unit, step)
        return owed >= UNMET and unit.index not in self.engine.shared

    def describe(self) -> list[str]:
        """For the start block."""
        if not self.decides and (self.every == 1 or not self.patient):
            return []
        when = f"every {self.every} steps"
        if self.decides:
            when = f"every step, or every {EVERY} while the GPU waits more than {START:.0%} of its time for the link"
        return [f"write-backs of a streamed block: {when} (same weights, less traffic)"]
