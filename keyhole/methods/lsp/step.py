"""What the units of one step of LSP share, and whether it was a whole step.

Without clipping a unit is updated before the gradients of others are known. One that is not finite leaves its unit as
it is, moments included; if that happened to some units and not to others, the weights are a mixture of two steps, and
the run must not go on. Whether it did is known on the device (units that have their moments there) and in the worker
(the others), both later than the host's launches: `check` looks at what has come in, and never waits unless told to.
With clipping the norm of all decides, and the step is left out as a whole: nothing to look at.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.lsp.piece import Piece


@dataclass
class Step:
    """What the units of one step share."""

    number: int = 0
    lr: float = 0.0
    given: dict[int, dict[str, Piece]] = field(default_factory=lambda: defaultdict(dict))
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[torch.Tensor] = field(default_factory=list)
    numbers: torch.Tensor | None = None  # on the host: norms by unit, and that of the whole
    clip: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    told: list[bool] = field(default_factory=list)  # by the worker: whether a unit was updated
    sent: int = 0  # units that it was asked to update
    skips: list[torch.Tensor] = field(default_factory=list)  # of units on the device: 1.0 was not updated
    report: tuple[Any, torch.Tensor] | None = None  # an event, and the sum of these on the host behind it

    def send_report(self) -> None:
        """How many units on the device skipped the step, on its way to the host."""
        if self.skips:
            event, here = None, torch.stack(self.skips).sum()
            if here.is_cuda:
                here = torch.empty((), pin_memory=True).copy_(here, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self.report = (event, here)

    def is_known(self) -> bool:
        """Whether everything has come in."""
        there = self.report is None or self.report[0] is None or self.report[0].query()
        return len(self.told) == self.sent and there

    def is_mixed(self) -> bool:
        """Whether some units were updated and some were not. Waits for the device."""
        skipped = self.told.count(False)
        if self.report is not None:
            event, here = self.report
            if event is not None:
                event.synchronize()
            skipped += int(here)
        return 0 < skipped < len(self.norms)


class Outcomes:
    """Steps that have not been looked at yet."""

    def __init__(self) -> None:
        self.unread: list[Step] = []
        self.broken = False  # a reverse ended with an error when units had been given

    def expect(self, step: Step) -> None:
        """The step's units have all been given."""
        step.send_report()
        self.unread.append(step)

    def check(self, wait: bool = False) -> None:
        """UserError if a step was applied in part. wait: also of steps that are not known yet; drain the host first."""
        mixed = self.broken
        while self.unread and (wait or self.unread[0].is_known()):
            mixed = self.unread.pop(0).is_mixed() or mixed
        if mixed:
            raise UserError(
                "lsp: a gradient was not finite in part of the last step, or an error came in between, and the rest "
                "had been applied: the weights in memory are not usable. Go on from the last checkpoint; max_grad_norm "
                "makes it skip a step with gradients that are not finite"
            )
