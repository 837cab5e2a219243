"""The arithmetic of a zeroth-order step on single elements, shared by flat.py, packed.py and rows.py.

    update    u = c_0 z_0 + c_1 z_1 + ...  (in order);   w <- round(w - lr (u + wd w))     z at update_step
    perturb   plus = w + eps z, and beside it in the same pass                             z at step
              minus = w - eps z, or w + eps z' of the next direction, or w itself, or nothing  (`beside`)

All arithmetic is float32 in the order written, with no fused multiply-add (the launches disable it), and one rounding
at the end. All passes share this code, so that an element gets the same bits in each of them. `coef` = [lr, c_0, ..,
c_{q-1}] is a tensor on the device: the host never reads the projected gradients, so no step waits for the one before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch

from keyhole.ops.arguments import Count, Scalar, check_scalars, float32, is_on_device
from keyhole.ops.backend import jit, store, tl
from keyhole.ops.noise.words import check_index, key, unsigned
from keyhole.ops.rounding.round import count_changed, round_nearest, rounded, stochastic_round_reference, widened

BESIDE = ("minus", "next", "clean", "nothing")
_MINUS, NEXT, _CLEAN = (tl.constexpr(1 + BESIDE.index(name)) for name in BESIDE[:3])


@dataclass(frozen=True)
class Flags:
    """What a kernel is specialised for."""

    Q: int  # directions of the update; 0: none
    PERTURB: int  # 0: no perturbation; else 1 + the index in BESIDE of what is written beside w + eps z
    GAUSSIAN: bool
    DECAY: bool
    STOCHASTIC: bool
    COUNT: bool
    PAIRS: bool
    ON_DEVICE: bool = False  # the steps are pointers


_flags = cache(Flags)  # there are few, and a launch takes less time with one that it has seen


@dataclass(frozen=True)
class ZOStep:
    """The settings of an op on weights: an update if `coef` is set, then a perturbation if the op makes one."""

    offset: int  # global index of the first weight
    seed: int
    distribution: str = "gaussian"
    coef: torch.Tensor | None = None
    update_step: Count = 0  # the step of the update's noise
    weight_decay: float = 0.0
    rounding: str = "stochastic"
    changed: Scalar = None  # int64: the number of changed stored values is added to it
    eps: float = 0.0
    step: Count = 0  # the step of the perturbation's noise, and its direction; both steps may be on the device
    direction: int = 0
    beside: str = "minus"  # the second output of a perturbation: one of BESIDE

    @property
    def directions(self) -> int:
        return 0 if self.coef is None else self.coef.numel() - 1

    def check(self, n: int, device: torch.device) -> None:
        steps = (self.update_step, self.step)
        drawn = self.direction + (2 if self.beside == "next" else 1)
        check_index(self.offset, n, self.seed, steps, max(self.directions, drawn))
        check_scalars(device, torch.int64, self.changed)
        if (coef := self.coef) is not None:
            assert coef.dtype == torch.float32 and coef.device == device, (coef.dtype, coef.device)
            assert coef.dim() == 1 and coef.is_contiguous() and coef.numel() >= 2, "coef is [lr, c_0, ...]"

    def is_stochastic(self, dtype: torch.dtype) -> bool:
        """Whether an update of weights of this dtype needs random bits: float32 is stored as computed."""
        return self.coef is not None and self.rounding == "stochastic" and dtype != torch.float32

    def flags(self, *, perturb: bool, stochastic: bool, pairs: bool = False) -> Flags:
        count, decay = self.coef is not None and self.changed is not None, float32(self.weight_decay) != 0
        kind = 1 + BESIDE.index(self.beside) if perturb else 0
        gaussian, there = self.distribution == "gaussian", is_on_device(*self.steps)
        return _flags(self.directions, kind, gaussian, decay, stochastic, count, pairs, there)

    @property
    def steps(self) -> tuple[Count, Count]:
        """update_step and step, both on the host or both on the device: one that is not used equals the other."""
        update_step, step = self.update_step, self.step
        if isinstance(step, torch.Tensor) and self.coef is None:
            update_step = step
        if isinstance(update_step, torch.Tensor) and not isinstance(step, torch.Tensor):
            step = update_step
        return update_step, step

    def numbers(self) -> tuple[Count | float, ...]:
        """update_step, step, direction, k0, k1, eps, wd: arguments of every kernel of this folder."""
        (update_step, *seed), (step, *_) = (key(self.seed, one) for one in self.steps)
        return update_step, step, self.direction, *seed, float32(self.eps), float32(self.weight_decay)


@jit()
def noise_words(update_step, step, direction, k0, k1):
    """In a kernel: the update's key, the perturbation's direction and key."""
    return unsigned(update_step, k0, k1), direction.to(tl.uint32), unsigned(step, k0, k1)


def updated_reference(
    w: torch.Tensor, how: ZOStep, draw: Callable[[int], torch.Tensor], bits: torch.Tensor | None
) -> torch.Tensor:
    """round(w - lr (sum_i c_i z_i + wd w)) in w's dtype. `draw(i)` makes z_i; `bits` is None for nearest."""
    w_fp32, coef, weight_decay = w.to(torch.float32), cast(torch.Tensor, how.coef), float32(how.weight_decay)
    u = draw(0).mul_(coef[1])
    for i in range(1, how.directions):
        u.add_(draw(i).mul_(coef[1 + i]))
    if weight_decay:
        u.add_(w_fp32 * weight_decay)
    moved = w_fp32 - u.mul_(coef[0])
    return moved.to(w.dtype) if bits is None else stochastic_round_reference(moved, bits, w.dtype)


@jit()
def updated(w, u, bits, lr, wd, HOW: tl.constexpr):
    """round(w - lr (u + wd w)): in w's dtype, and the same in float32."""
    w_fp32 = widened(w)
    if HOW.DECAY:
        u = u + wd * w_fp32
    return rounded(w_fp32 - lr * u, bits, w.dtype, HOW.STOCHASTIC)


@jit()
def store_updated(w_ptr, mask, w, u, bits, lr, wd, changed, HOW: tl.constexpr, MASKED: tl.constexpr):
    """Stores one updated vector; returns it in float32, and the counts of changes."""
    new, new_fp32 = updated(w, u, bits, lr, wd, HOW)
    store(w_ptr, new, mask, MASKED)
    if HOW.COUNT:
        changed = count_changed(changed, new, w, mask, HOW.PAIRS, MASKED)
    return new_fp32, changed


def perturb_reference(
    w: torch.Tensor, draw: Callable[[int], torch.Tensor], how: ZOStep, plus: torch.Tensor, minus: torch.Tensor
) -> None:
    """plus <- w + eps z, minus <- what `beside` says, rounded to nearest in their own dtype. `draw(i)` makes z_i."""
    w_fp32, move = w.to(torch.float32), draw(how.direction).mul_(float32(how.eps))
    plus.copy_(w_fp32 + move)
    if how.beside == "minus":
        minus.copy_(w_fp32 - move)
    elif how.beside == "next":
        minus.copy_(w_fp32 + draw(how.direction + 1).mul_(float32(how.eps)))
    elif how.beside == "clean":
        minus.copy_(w_fp32)


@jit()
def store_perturbed(plus_ptr, minus_ptr, mask, w, z, z_next, eps, HOW: tl.constexpr, MASKED: tl.constexpr = True):
    """Stores one vector of w + eps z, and beside it w - eps z, w + eps z_next, w or nothing."""
    w_fp32, move = w.to(tl.float32), eps * z
    store(plus_ptr, round_nearest(w_fp32 + move, plus_ptr.dtype.element_ty), mask, MASKED)
    if HOW.PERTURB == _MINUS:
        store(minus_ptr, round_nearest(w_fp32 - move, minus_ptr.dtype.element_ty), mask, MASKED)
    elif HOW.PERTURB == NEXT:
        store(minus_ptr, round_nearest(w_fp32 + eps * z_next, minus_ptr.dtype.element_ty), mask, MASKED)
    elif HOW.PERTURB == _CLEAN:
        store(minus_ptr, round_nearest(w_fp32, minus_ptr.dtype.element_ty), mask, MASKED)
