"""Adam on compressed gradients: each step overwrites its gradient. Also: the units whose moments are on the device.

    m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2     g <- - m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

torch's fused AdamW updates a parameter: w <- (1 - rate decay) w - rate (m ...). If it is called with the gradient as
the parameter, rate 1 and decay 1, it leaves just the step: the first factor is 0, and every element of w and g is read
before that of w is written, in the CPU kernel and in the GPU kernel. So no buffer is zeroed before and none copied
after: a number costs 12 bytes read and 12 written, in one pass, whatever the size of the caches. The bits are those of
a parameter of zeros updated with rate 1 and no decay (a test).

On the CPU, clipping divides the gradient by the kernel's own `grad_scale`. The GPU kernel would write the scaled
gradient back over the step, so there the gradient is multiplied before.

On the device all targets of a unit are one launch. The clip factor and the skip flag (a non-finite gradient) are on the
device, so the host never waits; t, the number of updates of a target, is there as well, since only the device knows
which updates were skipped. Bytes: 8 per number for the moments. With clipping by the global norm, every unit's gradient
waits for that norm in a buffer of its own: 4 more. (Moments in host memory: host.py.)
"""

from typing import Any

import torch

from keyhole.methods.lsp.target import ALL, Share, Target, Targets
from keyhole.methods.states import States

Tensors = list[torch.Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_delta_(
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    rule: dict[str, float],
    *,
    clip: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """Replaces every gradient by Adam's step, with its sign, and updates the moments. All are float32 on one device;
    steps: the number of updates of each, this one included. clip: a factor of the gradients. skip: 1.0 leaves the
    moments unchanged; the caller writes nan in place of the steps."""
    divisor = None
    if clip is not None and clip.is_cuda:
        torch._foreach_mul_(grads, clip)
    elif clip is not None:
        divisor = 1.0 / clip
    how: dict[str, Any]
    how = {"lr": 1.0, "weight_decay": 1.0, "amsgrad": False, "maximize": False, **rule}
    torch._fused_adamw_(grads, grads, exp_avgs, exp_avg_sqs, [], steps, grad_scale=divisor, found_inf=skip, **how)


class DeviceAdam:
    """Moments on the device, by unit. lengths: of the buffers of these units; waits: gradients wait for the norm;
    share: the part of them that this rank has."""

    def __init__(
        self,
        targets: Targets,
        lengths: dict[int, int],
        device: torch.device,
        rule: dict[str, float],
        waits: bool,
        share: Share = ALL,
    ) -> None:
        self.lengths, self.rule, self.share = {unit: share.numel(lengths[unit]) for unit in targets}, rule, share
        self.states = States(self.lengths, MOMENTS, device=device)
        self.waiting = {u: torch.empty(n, device=device) for u, n in self.lengths.items() if waits}
        self.index = {target.name: k for k, target in enumerate(t for members in targets.values() for t in members)}
        self.steps_K = torch.zeros(len(self.index), device=device)

    def deltas_(
        self, unit: int, targets: list[Target], grad: torch.Tensor, clip: torch.Tensor | None, skip: torch.Tensor
    ) -> None:
        """Replaces the gradients of these targets by their steps. skip: 1.0 changes nothing; a step of nan leaves its
        weight unchanged."""
        steps = [self.steps_K[self.index[target.name]] for target in targets]
        torch._foreach_add_(steps, 1.0)
        here = [(target, step) for target, step in zip(targets, steps, strict=True) if self.share.has(target, grad)]
        flats = (grad, *self.states.of(unit))
        grads, m, v = ([self.share.view_in(flat, target) for target, _ in here] for flat in flats)
        if here:
            adam_delta_(grads, m, v, [step for _, step in here], self.rule, clip=clip, skip=skip)
        torch._foreach_sub_(steps, [skip] * len(steps))
        grad.masked_fill_(skip.bool(), float("nan"))

    def moments(self, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        """m and v of a target, as views: this rank's part."""
        m, v = (self.share.view_in(flat, target) for flat in self.states.of(target.unit))
        return m, v

    def count(self, target: Target) -> int:
        """Number of updates so far. The host waits."""
        return int(self.steps_K[self.index[target.name]])

    def set_count(self, target: Target, count: int) -> None:
        self.steps_K[self.index[target.name]] = float(count)
