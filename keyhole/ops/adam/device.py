"""AdamW on the device, in the bits of torch's kernel for the CPU: an update may be made by either.

The rule is that of host.py. Bits are a matter of where it rounds, so here are all the places. With f() rounding to
float32, g the gradient (divided by f(1 / clip) if it is clipped), t the step, and fma rounding once:

    w <- w f(1 - lr decay)                                                      if decay is not 0
    m <- fma(f(1 - b1), g - m, m)                                               for b1 > 1/2; else it begins at g:
         fma(f(1 - b1) - 1, g - m, g)
    v <- b2 v + (f(1 - b2) g) g                                                 SQUARES below
    w <- w + (f(-lr / (1 - b1^t)) m) / (sqrt(v) / f(sqrt(1 - b2^t)) + f(eps))

Every operation rounds as IEEE 754 says, on any processor, the smallest numbers included. One thing is left to whoever
built torch: whether a compiler made one fma of v's product and sum, and of which product. So there are three ways, and
`squares_of_host` tries which one this machine's torch has (None: none of them; then the two must not be mixed).

Bytes an element: 12 read and written (w, m, v), the gradient read, the weight written. Arithmetic is nothing beside.
"""

import math

import torch

from keyhole.ops.adam.host import host_adamw_
from keyhole.ops.arguments import check_flat, float32
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.rounding.round import round_nearest

SQUARES = ("apart", "decayed", "square")  # v's sum: two roundings, or an fma with b2 v, or with g g
BLOCK = 1024
_APART, _DECAYED = tl.constexpr(0), tl.constexpr(1)


def numbers(step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
            clip: float) -> dict[str, float]:
    """The rule's constants: computed in double, rounded once, as torch does."""
    mean = float32(1 - beta1)
    found = {"keep": 1 - lr * weight_decay, "mean": mean if mean < 0.5 else mean - 1, "beta2": beta2,
             "square": 1 - beta2, "root": math.sqrt(1 - beta2**step), "eps": eps, "move": -lr / (1 - beta1**step),
             "divisor": 1 / clip}
    return {name: float32(value) for name, value in found.items()}


def _fma(a: torch.Tensor | float, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c rounded once: the product is exact in float64. (Twice, in one case of 2^29.)"""
    return (b.double() * a + c.double()).float()


def adamw_reference_(master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor,
                     weight: torch.Tensor, *, squares: str, n: dict[str, float], small: bool) -> None:
    g = grad.float() if n["divisor"] == 1 else grad.float() / n["divisor"]
    w = master if n["keep"] == 1 else master * n["keep"]
    m = _fma(n["mean"], g - exp_avg, exp_avg if small else g)
    scaled = g * n["square"]
    if squares == "apart":
        v = exp_avg_sq * n["beta2"] + scaled * g
    elif squares == "decayed":
        v = _fma(n["beta2"], exp_avg_sq, scaled * g)
    else:
        v = _fma(scaled.double(), g, exp_avg_sq * n["beta2"])
    w = w + (m * n["move"]) / (v.sqrt() / n["root"] + n["eps"])
    for target, value in ((master, w), (exp_avg, m), (exp_avg_sq, v), (weight, w)):
        target.copy_(value)


@jit(do_not_specialize=["n", "keep", "mean", "beta2", "square", "root", "eps", "move", "divisor"])
def _adamw_kernel(w_ptr, m_ptr, v_ptr, g_ptr, out_ptr, n, keep, mean, beta2, square, root, eps, move, divisor,
                  SMALL: tl.constexpr, DECAY: tl.constexpr, CLIP: tl.constexpr, WAY: tl.constexpr,
                  SIZE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = i < n
    g = tl.load(g_ptr + i, here, 0.0).to(tl.float32)
    w, m, v = tl.load(w_ptr + i, here, 0.0), tl.load(m_ptr + i, here, 0.0), tl.load(v_ptr + i, here, 0.0)
    if CLIP:
        g = tl.div_rn(g, tl.zeros_like(g) + divisor)
    if DECAY:
        w = w * keep
    m = tl.fma(tl.zeros_like(g) + mean, g - m, m if SMALL else g)
    scaled = square * g
    if WAY == _APART:
        v = beta2 * v + scaled * g
    elif WAY == _DECAYED:
        v = tl.fma(tl.zeros_like(g) + beta2, v, scaled * g)
    else:
        v = tl.fma(scaled, g, beta2 * v)
    w = w + tl.div_rn(move * m, tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(g) + root) + eps)
    tl.store(w_ptr + i, w, here)
    tl.store(m_ptr + i, m, here)
    tl.store(v_ptr + i, v, here)
    tl.store(out_ptr + i, round_nearest(w, out_ptr.dtype.element_ty), here)


def adamw_(master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor,
           weight: torch.Tensor, *, squares: str, step: int, lr: float, beta1: float = 0.9, beta2: float = 0.999,
           eps: float = 1e-8, weight_decay: float = 0.0, clip: float = 1.0) -> None:
    """One update of flat tensors of equal length, in place; step counts from 1. `weight` (the new weight, rounded to
    nearest) may be the memory of `grad`."""
    check_flat(master, exp_avg, exp_avg_sq, grad, weight)
    n, small = numbers(step, lr, beta1, beta2, eps, weight_decay, clip), float32(1 - beta1) < 0.5
    state = (master, exp_avg, exp_avg_sq, grad, weight)
    if not use_kernel(master.device):
        adamw_reference_(*state, squares=squares, n=n, small=small)
        return
    flags = dict(SMALL=small, DECAY=weight_decay != 0, CLIP=clip != 1.0, WAY=SQUARES.index(squares), SIZE=BLOCK)
    with on_device(master):
        _adamw_kernel[(-(-master.numel() // BLOCK),)](*state, master.numel(), *n.values(), **flags, num_warps=4,
                                                      enable_fp_fusion=False)


def squares_of_host(device: torch.device, **rule: float) -> str | None:
    """By which of SQUARES `adamw_` on this device gives the bits of host_adamw_, by this rule, clipped and not; None:
    by none."""
    draw, numel = torch.Generator().manual_seed(0), 1 << 16
    state = [torch.randn(numel, generator=draw) * scale for scale in (0.02, 1e-3, 1e-3, 1e-3)]
    state[2].square_()
    for flat in state[1:]:
        flat[: numel // 8] *= 1e-36  # numbers below the smallest normal one are numbers too
    ways = [{"step": 7, "lr": 1e-3, "weight_decay": 0.1, **rule, "clip": clip} for clip in (0.3, 1.0)]
    return next((squares for squares in SQUARES if all(_alike(state, squares, device, how) for how in ways)), None)


def _alike(state: list[torch.Tensor], squares: str, device: torch.device, how: dict[str, float]) -> bool:
    host, mine = [flat.clone() for flat in state], [flat.to(device, copy=True) for flat in state]
    host_adamw_(*host, None, **how)
    adamw_(*mine, torch.empty_like(mine[0]), squares=squares, **how)
    return all(torch.equal(a, b.cpu()) for a, b in zip(host[:3], mine, strict=False))
