"""Adam's step, in the place of its gradient.

    m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2     g <- - m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

torch's fused AdamW moves a parameter: w <- (1 - rate decay) w - rate (m ...). Called with the gradient for a parameter,
rate 1 and decay 1, it leaves just the step: the first factor is 0, and every element of w and g is read before the one
of w is written, in the CPU's kernel and in the GPU's. So no buffer is zeroed before and none copied after: a number
costs 12 bytes read and 12 written, in one pass, and the caches' size does not matter. To the bit it is what a parameter
of zeros would hold, with rate 1 and no decay (a test).

A divisor of the gradient (clipping) is the kernel's own `grad_scale` on the CPU. The GPU's kernel would write the
scaled gradient back over the step, so there the gradient is multiplied before.

All tensors are float32, and those of one call on one device; t counts a tensor's updates, this one included.
"""

import torch

Tensors = list[torch.Tensor]


def adam_delta_(grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, steps: Tensors, rule: dict[str, float], *,
                clip: torch.Tensor | None = None, skip: torch.Tensor | None = None) -> None:  # fmt: skip
    """Every gradient becomes Adam's step, with its sign; moments move on. clip: a factor of the gradients. skip: 1.0
    leaves the moments as they are; the caller puts nan where the steps would be."""
    divisor = None
    if clip is not None and clip.is_cuda:
        torch._foreach_mul_(grads, clip)
    elif clip is not None:
        divisor = 1.0 / clip
    how = {"lr": 1.0, "weight_decay": 1.0, "amsgrad": False, "maximize": False, **rule}
    torch._fused_adamw_(grads, grads, exp_avgs, exp_avg_sqs, [], steps, grad_scale=divisor, found_inf=skip, **how)
