"""What the units of one step of LSP share, and whether the step was applied to all of them.

Without clipping a unit is updated before the gradients of others are known. One that is not finite leaves its unit as
it is, moments included; if that happened to some units and not to others, the weights are a mixture of two steps, and
the run must not go on. Whether it did is known on the device (units that have their moments there) and in the worker
(the others), both later than the host's launches: `check` looks at what has come in, and waits only when told to.
With clipping the norm of all decides, and the step is left out for all units: nothing to look at.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.lsp.target import Target


@dataclass
class LSPStep:
    """What the units of one step share."""

    number: int = 0
    lr: float = 0.0
    received: dict[int, dict[str, Target]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # targets with a gradient, by unit
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[torch.Tensor] = field(default_factory=list)  # of the units whose gradients are complete
    target_norms: dict[int, torch.Tensor] = field(default_factory=dict)  # of their targets, by the first element
    host_norms: torch.Tensor | None = None  # on the host: by unit, and at the end that of all
    clip: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    submitted: int = 0  # units that the worker was asked to update
    outcomes: list[bool] = field(default_factory=list)  # by the worker: whether a unit was updated
    skips: list[torch.Tensor] = field(default_factory=list)  # of units on the device: 1.0 was not updated
    report: tuple[Any, torch.Tensor] | None = None  # an event, and the sum of these on the host behind it

    def norm(self) -> torch.Tensor | None:
        """Of all that the optimizer sees: over targets in the order of the model, however it is cut into units."""
        norms = [self.target_norms[start] for start in sorted(self.target_norms)]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    def send_report(self) -> None:
        """How many units on the device skipped the step, on its way to the host."""
        if self.skips:
            event, skipped = None, torch.stack(self.skips).sum()
            if skipped.is_cuda:
                skipped = torch.empty((), pin_memory=True).copy_(skipped, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self.report = (event, skipped)

    def is_known(self) -> bool:
        """Whether everything has come in."""
        reported = self.report is None or self.report[0] is None or self.report[0].query()
        return len(self.outcomes) == self.submitted and reported

    def is_mixed(self) -> bool:
        """Whether some units were updated and some were not. Waits for the device."""
        skipped = self.outcomes.count(False)
        if self.report is not None:
            event, on_device = self.report
            if event is not None:
                event.synchronize()
            skipped += int(on_device)
        return 0 < skipped < len(self.norms)


class UncheckedSteps:
    """Steps of which is not known yet whether they were applied to all units."""

    def __init__(self) -> None:
        self.steps: list[LSPStep] = []
        self.broken = False  # a reverse ended with an error when units had their gradients

    def add(self, step: LSPStep) -> None:
        """The gradients of all units of the step are complete."""
        step.send_report()
        self.steps.append(step)

    def check(self, wait: bool = False) -> None:
        """UserError if a step was applied in part. wait: also of steps that are not known yet; drain the host first."""
        mixed = self.broken
        while self.steps and (wait or self.steps[0].is_known()):
            mixed = self.steps.pop(0).is_mixed() or mixed
        if mixed:
            raise UserError(
                "lsp: a gradient was not finite in part of the last step, or an error came in between, and the rest "
                "had been applied: the weights in memory are not usable. Go on from the last checkpoint; max_grad_norm "
                "makes it skip a step with gradients that are not finite"
            )
