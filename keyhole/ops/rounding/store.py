"""How a new weight is stored: the last step of every update that has a gradient (LOMO, AdaLOMO, LSP).

An update ends in float32, at x. The stored value depends on the rounding:

    nearest      w = round(x)
    stochastic   w = x rounded up or down at random, unbiased (round.py)
    kahan        x is only the step y = c + (the change of w):
                 t = round(w + y) ;  c = round(y - (t - w)) ;  w = t                   all to nearest
                 c, of w's dtype and shape, is the rounding error so far: 2 more bytes per element, no noise

Float32 weights are stored as computed. If an element must not be updated (its gradient is inf or nan), the caller marks
it and the old value is stored again.
"""

from dataclasses import dataclass

import torch

from keyhole.ops.arguments import Count, Scalar, check_scalars, check_tensors
from keyhole.ops.backend import jit, tl
from keyhole.ops.noise.words import check_index
from keyhole.ops.rounding.round import ROUNDINGS, round_nearest, round_stochastic, stochastic_round_reference

ALL_ROUNDINGS = (*ROUNDINGS, "kahan")


@dataclass(frozen=True)
class Store:
    """How an op stores the weights of one tensor."""

    rounding: str = "nearest"
    compensation: torch.Tensor | None = None  # c, with kahan only
    offset: int = 0  # global index of the tensor's first element; with seed and step it determines the random bits
    seed: int = 0
    step: Count = 0
    changed: Scalar = None  # int64: the number of changed stored values is added to it

    def check(self, w: torch.Tensor, *others: torch.Tensor) -> None:
        """Asserts the requirements on weights, on tensors of the same shape, and on these settings."""
        c = self.compensation
        assert self.rounding in ALL_ROUNDINGS and (self.rounding == "kahan") == (c is not None), self.rounding
        check_tensors(w, *others, *(() if c is None else (c,)))
        check_scalars(w.device, torch.int64, self.changed)
        check_index(self.offset, w.numel(), self.seed, (self.step,))

    def is_stochastic(self, dtype: torch.dtype) -> bool:
        return self.rounding == "stochastic" and dtype != torch.float32


def store_weight_reference_(
    w: torch.Tensor, c: torch.Tensor | None, x: torch.Tensor, fine: torch.Tensor, bits: torch.Tensor | None, how: Store
) -> None:
    """Stores new weights (and compensations) where `fine`. x (float32): the new weight, or Kahan's step y. bits: None
    for nearest. w, c: the tensors of `how`, or parts of them."""
    if c is None:
        new = x.to(w.dtype) if bits is None else stochastic_round_reference(x, bits, w.dtype)
    else:
        w_fp32 = w.to(torch.float32)
        new = (w_fp32 + x).to(w.dtype)
        c.copy_(torch.where(fine, (x - (new.to(torch.float32) - w_fp32)).to(w.dtype), c))
    new = torch.where(fine, new, w)
    if how.changed is not None:
        how.changed.add_((new != w).sum())
    w.copy_(new)


@jit()
def store_weight(w_ptr, c_ptr, mask, fine, w, x, bits, STOCHASTIC: tl.constexpr):
    """Stores one vector of new weights (and compensations); returns, per element, whether it changed (0 or 1).

    mask: elements of the tensor. fine: elements that may change; elsewhere the old value is stored, since a mask that
    differs from element to element would prevent wide memory accesses.
    """
    w_fp32 = w.to(tl.float32)
    if c_ptr is not None:
        new = tl.where(fine, round_nearest(w_fp32 + x, w.dtype), w)
        c = round_nearest(x - (new.to(tl.float32) - w_fp32), w.dtype)
        tl.store(c_ptr, tl.where(fine, c, tl.load(c_ptr, mask, 0.0)), mask)
    elif STOCHASTIC:
        new = tl.where(fine, round_stochastic(x, bits, w.dtype), w)
    else:
        new = tl.where(fine, round_nearest(x, w.dtype), w)
    tl.store(w_ptr, new, mask)
    return ((new.to(tl.float32) != w_fp32) & mask).to(tl.int32)
