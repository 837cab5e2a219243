"""AdamW on host memory, exact, in one pass over DRAM.

For a flat range of parameters with fp32 master w, moments m and v, gradient g (any float dtype), clip factor c, step t:

    w <- (1 - lr decay) w         m <- b1 m + (1 - b1) c g         v <- b2 v + (1 - b2) (c g)^2
    w <- w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)      weight <- w, rounded to nearest

Only the 16-bit weight is rounded; the master stays exact, so no small update is lost. Bytes per parameter: 12 stay
(w, m, v), and 2 for the incoming gradient and the outgoing weight, which may be the same memory: the weight overwrites
the gradient after its use.

torch has a fused AdamW for the CPU: vectorised, threaded, without the GIL, and it needs no compiler. But it requires
all its tensors in one dtype, and casting whole tensors before and after costs two more passes over DRAM. So the range
is cut into chunks that fit the caches: cast in, update, cast out, chunk by chunk. Every thread gets the same part of a
chunk in all three, so it finds its data in its core's own cache. DRAM traffic is 14 bytes read and 14 written per
parameter, as much as torch's kernel needs for fp32 alone.

Bits: with c = 1, w, m and v are those of torch.optim.AdamW(fused=True), whatever the chunk and the number of threads
(ranges must start at a multiple of 16 elements: the kernel's vectors). Its other implementations order a few
operations differently and agree to about 1e-7 of an update. c is applied as a division by 1 / c inside the kernel:
one more rounding.
"""

from typing import Any

import torch

CHUNK_PER_THREAD = 128 * 1024  # elements: w, m, v and the cast gradient are 2 MiB per thread


def host_adamw_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    scratch: torch.Tensor | None = None,
) -> None:
    """One update of flat host tensors of equal length; step counts from 1. `weight` may be the memory of `grad` (the
    contents of `grad` are unspecified afterwards), or None if only the master is needed. scratch: fp32, its length is
    the chunk; allocated here if None."""
    if scratch is None:
        scratch = torch.empty(CHUNK_PER_THREAD * torch.get_num_threads())
    chunk = scratch.numel()
    count = [torch.tensor(float(step))]
    divisor = None if clip == 1.0 else torch.tensor(1.0 / clip)
    how: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    how |= {"amsgrad": False, "maximize": False, "grad_scale": divisor, "found_inf": None}
    pieces = (flat.split(chunk) for flat in (master, exp_avg, exp_avg_sq, grad, grad if weight is None else weight))
    for w, m, v, g, out in zip(*pieces, strict=True):
        cast = g if g.dtype == torch.float32 else scratch[: g.numel()].copy_(g)
        torch._fused_adamw_([w], [cast], [m], [v], [], count, **how)
        if weight is not None:
            out.copy_(w)
