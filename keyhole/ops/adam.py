"""AdamW on fp32 masters and moments: on host memory by torch's kernel, and on the device with the same bits.

For a flat range of parameters with fp32 master w, moments m and v, gradient g (any float dtype), clip factor c, step t:

    w <- (1 - lr decay) w         m <- b1 m + (1 - b1) c g         v <- b2 v + (1 - b2) (c g)^2
    w <- w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)      weight <- w, rounded to nearest

Only the 16-bit weight is rounded; the master stays exact, so no small update is lost. Bytes per parameter: 12 stay
(w, m, v), and 2 for the incoming gradient and the outgoing weight, which may be the same memory: the weight overwrites
the gradient after its use.

On the host. torch has a fused AdamW for the CPU: vectorised, threaded, without the GIL, and it needs no compiler. But
it requires all its tensors in one dtype, and casting whole tensors before and after costs two more passes over DRAM. So
the range is cut into chunks that fit the caches: cast in, update, cast out, chunk by chunk. Every thread gets the same
part of a chunk in all three, so it finds its data in its core's own cache. DRAM traffic is 14 bytes read and 14 written
per parameter, as much as torch's kernel needs for fp32 alone.

Bits: with c = 1, w, m and v are those of torch.optim.AdamW(fused=True), whatever the chunk and the number of threads
(ranges must start at a multiple of 16 elements: the kernel's vectors). Its other implementations order a few
operations differently and agree to about 1e-7 of an update. c is applied as a division by 1 / c inside the kernel:
one more rounding.

On the device. An update may run on either, and which one runs it depends on timing, so both must give the same bits.
These depend on where torch's kernel rounds: with f() rounding to float32 and fma rounding once,

    w <- w f(1 - lr decay)                                                      if decay is not 0
    m <- fma(f(1 - b1), g - m, m)                                               if b1 > 1/2
    m <- fma(f(1 - b1) - 1, g - m, g)                                           else
    v <- b2 v + (f(1 - b2) g) g                                                 SQUARES below
    w <- w + (f(-lr / (1 - b1^t)) m) / (sqrt(v) / f(sqrt(1 - b2^t)) + f(eps))

One thing depends on the build of torch: whether its compiler fused v's product and sum into an fma, and which product.
`squares_of_host` tries the three possibilities on this machine (None: none of them; then only the host updates).
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from keyhole.ops.arguments import check_flat, float32
from keyhole.ops.backend import jit, on_device, tl
from keyhole.ops.rounding.round import round_nearest

CHUNK_PER_THREAD = 128 * 1024  # elements: w, m, v and the cast gradient are 2 MiB per thread
SQUARES = ("apart", "decayed", "square")  # how v is summed: two roundings, or an fma with b2 v, or with g g
BLOCK = 1024
_APART, _DECAYED = tl.constexpr(0), tl.constexpr(1)


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
    how: dict[str, Any] = {
        "lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay,
        "amsgrad": False, "maximize": False, "grad_scale": divisor, "found_inf": None,
    }  # fmt: skip
    pieces = (flat.split(chunk) for flat in (master, exp_avg, exp_avg_sq, grad, grad if weight is None else weight))
    for w, m, v, g, out in zip(*pieces, strict=True):
        cast = g if g.dtype == torch.float32 else scratch[: g.numel()].copy_(g)
        torch._fused_adamw_([w], [cast], [m], [v], [], count, **how)
        if weight is not None:
            out.copy_(w)


@jit(do_not_specialize=["n", "keep", "mean", "beta2", "square", "root", "eps", "move", "divisor"])
def _adamw_kernel(
    w_ptr, m_ptr, v_ptr, g_ptr, out_ptr,
    n, keep, mean, beta2, square, root, eps, move, divisor,
    SMALL: tl.constexpr, SQUARES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program: SIZE elements. Arguments that are None are skipped."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = i < n
    g = tl.load(g_ptr + i, here, 0.0).to(tl.float32)
    w, m, v = tl.load(w_ptr + i, here, 0.0), tl.load(m_ptr + i, here, 0.0), tl.load(v_ptr + i, here, 0.0)
    if divisor is not None:
        g = tl.div_rn(g, tl.zeros_like(g) + divisor)
    if keep is not None:
        w = w * keep
    m = tl.fma(tl.zeros_like(g) + mean, g - m, m if SMALL else g)
    scaled = square * g
    if SQUARES == _APART:
        v = beta2 * v + scaled * g
    elif SQUARES == _DECAYED:
        v = tl.fma(tl.zeros_like(g) + beta2, v, scaled * g)
    else:
        v = tl.fma(scaled, g, beta2 * v)
    w = w + tl.div_rn(move * m, tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(g) + root) + eps)
    tl.store(w_ptr + i, w, here)
    tl.store(m_ptr + i, m, here)
    tl.store(v_ptr + i, v, here)
    tl.store(out_ptr + i, round_nearest(w, out_ptr.dtype.element_ty), here)


def adamw_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    *,
    squares: str,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float = 1.0,
) -> None:
    """The same by kernel, on the device (its reference is host_adamw_). The rule's constants are computed in double and
    rounded once, as in torch."""
    tensors = (master, exp_avg, exp_avg_sq, grad, weight)
    check_flat(*tensors)
    mean, keep = float32(1 - beta1), float32(1 - lr * weight_decay) if weight_decay else None
    numbers = (beta2, 1 - beta2, math.sqrt(1 - beta2**step), eps, -lr / (1 - beta1**step))
    constants = (keep, mean if mean < 0.5 else float32(mean - 1), *map(float32, numbers))
    flags = {"SMALL": mean < 0.5, "SQUARES": SQUARES.index(squares), "SIZE": BLOCK, "enable_fp_fusion": False}
    divisor = None if clip == 1.0 else float32(1 / clip)
    with on_device(master):
        _adamw_kernel[(-(-master.numel() // BLOCK),)](*tensors, master.numel(), *constants, divisor, **flags)


def squares_of_host(
    device: torch.device, rule: dict[str, float], host: Callable[..., None] = host_adamw_
) -> str | None:
    """The variant of SQUARES with which `adamw_` on this device has the bits of the host under this rule, clipped and
    unclipped; None if there is none."""
    draw, numel = torch.Generator().manual_seed(0), 1 << 16
    state = [torch.randn(numel, generator=draw) * scale for scale in (0.02, 1e-3, 1e-3, 1e-3)]
    state[2].square_()
    for flat in state[1:]:
        flat[: numel // 8] *= 1e-36  # includes subnormal numbers

    def alike(squares: str, clip: float) -> bool:
        how: dict[str, Any] = {"step": 7, "lr": 1e-3, "weight_decay": 0.1, **rule, "clip": clip}
        here, (w, m, v, g) = [flat.clone() for flat in state], [flat.to(device, copy=True) for flat in state]
        host(*here, None, **how)
        adamw_(w, m, v, g, torch.empty_like(w), squares=squares, **how)
        return all(torch.equal(a, b.cpu()) for a, b in zip(here[:3], (w, m, v), strict=True))

    return next((squares for squares in SQUARES if alike(squares, 0.3) and alike(squares, 1.0)), None)
