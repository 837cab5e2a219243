"""Adam on what LSP compressed: the step in the place of its gradient, and the units whose moments are on the device.

    m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2     g <- - m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

torch's fused AdamW moves a parameter: w <- (1 - rate decay) w - rate (m ...). Called with the gradient for a parameter,
rate 1 and decay 1, it leaves just the step: the first factor is 0, and every element of w and g is read before the one
of w is written, in the CPU's kernel and in the GPU's. So no buffer is zeroed before and none copied after: a number
costs 12 bytes read and 12 written, in one pass, and the caches' size does not matter. To the bit it is what a parameter
of zeros would hold, with rate 1 and no decay (a test).

A divisor of the gradient (clipping) is the kernel's own `grad_scale` on the CPU. The GPU's kernel would write the
scaled gradient back over the step, so there the gradient is multiplied before.

On the device all targets of a unit are one launch. The clip factor and "skip this step" (a gradient that is not finite)
are numbers on the device, so the host never waits; t, which counts the updates of a target, is there as well, since
only the device knows which were skipped. Bytes: 8 per number for the moments. With clipping by the norm of the whole,
every unit's gradient waits for that norm in a buffer of its own: 4 more. (Moments in host memory: host.py.)
"""

import torch

from keyhole.methods.lsp.gradient_buffers import ALL, Share, Targets
from keyhole.methods.lsp.target import Target

Tensors = list[torch.Tensor]


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
    """Every gradient becomes Adam's step, with its sign; moments move on. All are float32 on one device; steps: how
    many updates each has had, this one included. clip: a factor of the gradients. skip: 1.0 leaves the moments as they
    are; the caller puts nan where the steps would be."""
    divisor = None
    if clip is not None and clip.is_cuda:
        torch._foreach_mul_(grads, clip)
    elif clip is not None:
        divisor = 1.0 / clip
    how = {"lr": 1.0, "weight_decay": 1.0, "amsgrad": False, "maximize": False, **rule}
    torch._fused_adamw_(grads, grads, exp_avgs, exp_avg_sqs, [], steps, grad_scale=divisor, found_inf=skip, **how)


class DeviceAdam:
    """Moments on the device, by unit. lengths: of the buffers of these units; waits: gradients wait for the norm;
    share: which part of them is here."""

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
        self.m, self.v = ({u: torch.zeros(n, device=device) for u, n in self.lengths.items()} for _ in range(2))
        self.waiting = {u: torch.empty(n, device=device) for u, n in self.lengths.items() if waits}
        self.index = {target.name: k for k, target in enumerate(t for members in targets.values() for t in members)}
        self.steps_K = torch.zeros(len(self.index), device=device)

    def deltas_(
        self, unit: int, targets: list[Target], grad: torch.Tensor, clip: torch.Tensor | None, skip: torch.Tensor
    ) -> None:
        """The gradients of these targets become their steps. skip: 1.0 changes nothing; a step of nan leaves its weight
        alone."""
        steps = [self.steps_K[self.index[target.name]] for target in targets]
        torch._foreach_add_(steps, 1.0)
        here = [(target, step) for target, step in zip(targets, steps, strict=True) if self.share.has(target, grad)]
        flats = (grad, self.m[unit], self.v[unit])
        grads, m, v = ([self.share.view_in(flat, target) for target, _ in here] for flat in flats)
        if here:
            adam_delta_(grads, m, v, [step for _, step in here], self.rule, clip=clip, skip=skip)
        torch._foreach_sub_(steps, [skip] * len(steps))
        grad.masked_fill_(skip.bool(), float("nan"))

    def moments(self, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        """m and v of a target, as views: what is here of them."""
        m, v = (self.share.view_in(flat[target.unit], target) for flat in (self.m, self.v))
        return m, v

    def count(self, target: Target) -> int:
        """Updates so far. The host waits."""
        return int(self.steps_K[self.index[target.name]])

    def set_count(self, target: Target, count: int) -> None:
        self.steps_K[self.index[target.name]] = float(count)
