"""AdamW on the device, with the bits of torch's CPU kernel, so that an update may run on either.

The rule is that of host.py. Its bits depend on where it rounds, so all roundings are listed here. With f() rounding to
float32, g the gradient (divided by f(1 / clip) if it is clipped), t the step, and fma rounding once:

    w <- w f(1 - lr decay)                                                      if decay is not 0
    m <- fma(f(1 - b1), g - m, m)                                               if b1 > 1/2
    m <- fma(f(1 - b1) - 1, g - m, g)                                           else
    v <- b2 v + (f(1 - b2) g) g                                                 SQUARES below
    w <- w + (f(-lr / (1 - b1^t)) m) / (sqrt(v) / f(sqrt(1 - b2^t)) + f(eps))

Every operation rounds according to IEEE 754, on any processor, subnormal numbers included. One thing depends on the
build of torch: whether the compiler fused v's product and sum into an fma, and which product. So there are three
variants, and `squares_of_host` finds the one that this machine's torch uses (None: none of them; then CPU and GPU
updates must not be mixed).

Bytes per element: 12 read and written (w, m, v), the gradient read, the weight written. The arithmetic is negligible
beside that.
"""

import math
from typing import Any, TypedDict, cast

import torch

from keyhole.ops.adam.host import host_adamw_
from keyhole.ops.arguments import check_flat, float32
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.rounding.round import round_nearest

SQUARES = ("apart", "decayed", "square")  # how v is summed: two roundings, or an fma with b2 v, or with g g
BLOCK = 1024
_APART, _DECAYED = tl.constexpr(0), tl.constexpr(1)


class Constants(TypedDict):
    """Numbers of one update, in the order in which the kernel takes them. None: not needed."""

    keep: float | None
    mean: float
    beta2: float
    square: float
    root: float
    eps: float
    move: float
    divisor: float | None


def constants(
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, clip: float
) -> Constants:
    """The rule's constants: computed in double, rounded once, as in torch."""
    mean = float32(1 - beta1)
    keep = 1 - lr * weight_decay if weight_decay else None
    found: dict[str, float | None] = {"keep": keep, "mean": mean if mean < 0.5 else mean - 1}
    found |= {"beta2": beta2, "square": 1 - beta2, "root": math.sqrt(1 - beta2**step), "eps": eps}
    found |= {"move": -lr / (1 - beta1**step), "divisor": None if clip == 1.0 else 1 / clip}
    return cast(Constants, {name: None if value is None else float32(value) for name, value in found.items()})


def _fma(a: torch.Tensor | float, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c rounded once: the product is exact in float64. (Twice, in one case of 2^29.)"""
    return (b.double() * a + c.double()).float()


def adamw_reference_(tensors: tuple[torch.Tensor, ...], n: Constants, small: bool, squares: str) -> None:
    """The formulas above, in order. tensors: master, exp_avg, exp_avg_sq, grad, weight; small: 1 - b1 < 1/2."""
    w, m, v, g, weight = tensors
    g = g.float() if n["divisor"] is None else g.float() / n["divisor"]
    w_new = w if n["keep"] is None else w * n["keep"]
    m_new, scaled = _fma(n["mean"], g - m, m if small else g), g * n["square"]
    if squares == "apart":
        v_new = v * n["beta2"] + scaled * g
    elif squares == "decayed":
        v_new = _fma(n["beta2"], v, scaled * g)
    else:
        v_new = _fma(scaled.double(), g, v * n["beta2"])
    root = v_new.double().sqrt().float()  # torch's sqrt of float32 is the library MKL's on some CPUs: often one bit off
    w_new = w_new + (m_new * n["move"]) / (root / n["root"] + n["eps"])
    for target, value in ((w, w_new), (m, m_new), (v, v_new), (weight, w_new)):
        target.copy_(value)


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
    """One update of flat tensors of equal length, in place; step counts from 1. `weight` (the new weight, rounded to
    nearest) may be the memory of `grad`."""
    tensors = (master, exp_avg, exp_avg_sq, grad, weight)
    check_flat(*tensors)
    n = constants(step, lr, beta1, beta2, eps, weight_decay, clip)
    small, grid = float32(1 - beta1) < 0.5, (-(-master.numel() // BLOCK),)
    if not use_kernel(master.device):
        return adamw_reference_(tensors, n, small, squares)
    flags = {"SMALL": small, "SQUARES": SQUARES.index(squares), "SIZE": BLOCK}
    with on_device(master):
        _adamw_kernel[grid](*tensors, master.numel(), *n.values(), **flags, num_warps=4, enable_fp_fusion=False)


def squares_of_host(device: torch.device, **rule: float) -> str | None:
    """The variant of SQUARES with which `adamw_` on this device has the bits of host_adamw_ under this rule, clipped
    and unclipped; None if there is none."""
    draw, numel = torch.Generator().manual_seed(0), 1 << 16
    state = [torch.randn(numel, generator=draw) * scale for scale in (0.02, 1e-3, 1e-3, 1e-3)]
    state[2].square_()
    for flat in state[1:]:
        flat[: numel // 8] *= 1e-36  # includes subnormal numbers
    ways = [{"step": 7, "lr": 1e-3, "weight_decay": 0.1, **rule, "clip": clip} for clip in (0.3, 1.0)]
    return next((squares for squares in SQUARES if all(_alike(state, squares, device, how) for how in ways)), None)


def _alike(state: list[torch.Tensor], squares: str, device: torch.device, how: dict[str, Any]) -> bool:
    """Whether both compute the same bits from this state."""
    host, mine = [flat.clone() for flat in state], [flat.to(device, copy=True) for flat in state]
    (w, m, v, g), (w_mine, m_mine, v_mine, g_mine) = host, mine
    host_adamw_(w, m, v, g, None, **how)
    adamw_(w_mine, m_mine, v_mine, g_mine, torch.empty_like(w_mine), squares=squares, **how)
    return all(torch.equal(a, b.cpu()) for a, b in zip(host[:3], mine, strict=False))
