"""Data shared by the units of one step of LSP, and whether the step was applied to all of them.

Without clipping a unit is updated before the gradients of others are known. A non-finite gradient leaves its unit
unchanged, moments included; of units with moments on the host, a whole block stays unchanged. If that happened to some
units and not to others, the weights mix two steps, and the run must stop. The result is known on the device (for units
with moments there) and in the worker (for the others), both later than the host's launches: `check` reads the results
that have arrived, and waits only on request. With clipping the global norm decides, and all units skip the step:
nothing needs to be checked.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.lsp.target import Target


@dataclass
class LSPStep:
    """Data shared by the units of one step."""

    number: int = 0
    lr: float = 0.0
    received: dict[int, dict[str, Target]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # targets with a gradient, by unit
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[torch.Tensor] = field(default_factory=list)  # of units on the device, and of groups sent to the host
    target_norms: dict[int, torch.Tensor] = field(default_factory=dict)  # of their targets, by the first element
    host_norms: Any = None  # a tensor on the host: by the first unit sent, and at the end the global norm
    clip: Any = None  # and skip: tensors, once the norm is known
    skip: Any = None
    submitted: int = 0  # number of jobs submitted to the worker
    outcomes: list[bool] = field(default_factory=list)  # from the worker: whether the units of a job were updated
    skips: list[torch.Tensor] = field(default_factory=list)  # of units on the device: 1.0 means not updated
    report: tuple[Any, torch.Tensor] | None = None  # an event, and the sum of `skips` on the host after it

    def norm(self) -> torch.Tensor | None:
        """The norm of all that the optimizer sees: over targets in the order of the model, however it is cut."""
        norms = [self.target_norms[start] for start in sorted(self.target_norms)]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    def send_report(self) -> None:
        """Starts to copy the number of units on the device that skipped the step to the host."""
        if self.skips:
            event, skipped = None, torch.stack(self.skips).sum()
            if skipped.is_cuda:
                skipped = torch.empty((), pin_memory=True).copy_(skipped, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self.report = (event, skipped)

    def is_known(self) -> bool:
        """Whether all results have arrived."""
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
    """Steps for which it is not known yet whether they were applied to all units."""

    def __init__(self) -> None:
        self.steps: list[LSPStep] = []
        self.broken = False  # a backward pass ended with an error after units had received gradients

    def add(self, step: LSPStep) -> None:
        """The gradients of all units of the step are complete."""
        step.send_report()
        self.steps.append(step)

    def check(self, wait: bool = False) -> None:
        """UserError if a step was applied in part. wait: also for results that have not arrived; drain first."""
        mixed = self.broken
        while self.steps and (wait or self.steps[0].is_known()):
            mixed = self.steps.pop(0).is_mixed() or mixed
        if mixed:
            raise UserError(
                "lsp: a gradient was not finite in part of the last step, or an error came in between, and the rest "
                "had been applied: the weights in memory are not usable. Go on from the last checkpoint; max_grad_norm "
                "makes it skip a step with gradients that are not finite"
            )
