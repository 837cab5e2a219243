"""How a weight that has moved is stored: one ending for every update that has a gradient (LOMO, AdaLOMO, LSP).

An update ends in float32, at x. What is stored depends on the rounding:

    nearest      w = round(x)
    stochastic   w = x rounded up or down by chance, right on average (rounding.py)
    kahan        x is only the step y = c + (what w should move by):
                 t = round(w + y) ;  c = round(y - (t - w)) ;  w = t                   all to nearest
                 c, of w's dtype and shape, is what rounding has lost so far: 2 more bytes an element, no noise

Float32 weights are stored as computed. Where the update of an element is not to happen (a gradient that is inf or
nan), the caller says so and the old value is stored again.
"""

import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.noise.tiles import chunks
from keyhole.ops.rounding import round as rounds
from keyhole.ops.rounding.round import chunk_bits_reference, round_nearest, round_stochastic

ROUNDINGS = (*rounds.ROUNDINGS, "kahan")


def bits_reference(w: torch.Tensor, offset: int, seed: int, step: int) -> torch.Tensor:
    """The 16 bits of every element of a contiguous tensor, in its shape."""
    parts = [chunk_bits_reference(offset + part.start, part.stop - part.start, seed=seed, step=step, device=w.device)
             for part in chunks(offset, w.numel())]
    return torch.cat(parts).view(w.shape)


def settle_reference(w: torch.Tensor, x: torch.Tensor, c: torch.Tensor | None,
                     bits: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The new weight and compensation. x (float32): the new weight, or Kahan's step y. bits: None for nearest."""
    if c is None:
        return (x.to(w.dtype) if bits is None else rounds.stochastic_round_reference(x, bits, w.dtype)), None
    w_fp32 = w.to(torch.float32)
    t = (w_fp32 + x).to(w.dtype)
    return t, (x - (t.to(torch.float32) - w_fp32)).to(w.dtype)


@jit()
def settle(w_ptr, c_ptr, mask, fine, w, x, bits, STOCHASTIC: tl.constexpr):
    """Store one vector of new weights (and compensations); returns, per element, whether it changed (0 or 1).

    mask: where the tensor is. fine: where it may move; elsewhere the old value is stored, since a mask that differs
    from element to element would make memory move one element at a time.
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
