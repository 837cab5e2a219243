"""Decompressing: W <- round(keep W + alpha P delta Q^T), in place.

For blocks on both sides there is a kernel (blocks.py). Drawn positions (free) take two gathers in torch, on any device:

    1. E = delta Q^T       [d_P, n]   float32: the step, decompressed on one side
    2. row i of W:         w_i <- round(keep w_i + alpha sum_k P[i, k] E[column(i, k), :])

`keep` is 1 - lr wd, 1 without weight decay. All arithmetic is float32; the rounding is that of rounding/store.py:
nearest, or stochastic with the bits of rounding/bits.py. Reference and kernel differ by the rounding of the sums.
Legend: m, n sides of W; A rows of delta (d of P), d columns (d of Q), r entries per row.
"""

import torch

from keyhole.ops.arguments import Count, Number, number
from keyhole.ops.backend import on_device, use_kernel
from keyhole.ops.lsp.blocks import blocks_triton_, is_one_stage
from keyhole.ops.lsp.projector import Projector
from keyhole.ops.rounding.bits import bits2d_reference
from keyhole.ops.rounding.store import Store, store_weight_reference_


def decompress_add_reference_(
    w_mn: torch.Tensor, delta_Ad: torch.Tensor, p: Projector, q: Projector, alpha: Number, keep: Number, how: Store
) -> None:
    columns_nr, columns_mr = q.columns_Rr(), p.columns_Rr()
    wide_An = torch.zeros(p.d, q.rows, device=w_mn.device)
    for k in range(q.r):
        wide_An += delta_Ad[:, columns_nr[:, k]].to(torch.float32) * q.values_Rr[:, k]
    moved_mn = torch.zeros(w_mn.shape, device=w_mn.device)
    for k in range(p.r):
        moved_mn += p.values_Rr[:, k, None] * wide_An[columns_mr[:, k]]
    which = {"offset": how.offset, "seed": how.seed, "step": int(how.step)}
    bits = bits2d_reference(*w_mn.shape, **which, device=w_mn.device) if how.is_stochastic(w_mn.dtype) else None
    x_mn = w_mn.to(torch.float32) * keep + moved_mn * alpha
    store_weight_reference_(w_mn, None, x_mn, torch.isfinite(moved_mn), bits, how)


def decompress_add_(
    w_mn: torch.Tensor,
    delta_dd: torch.Tensor,
    p: Projector,
    q: Projector,
    alpha: Number,
    *,
    keep: Number = 1.0,
    rounding: str = "nearest",
    offset: int = 0,
    seed: int = 0,
    step: Count = 0,
) -> None:
    """w <- round(keep w + alpha P delta Q^T), in place.

    w: contiguous [m, n], float32 | bfloat16 | float16; delta: contiguous [d_P, d_Q], any of these. offset: global
    index of w's first element. alpha, keep and step: values, or all three as tensors on the device. Where the step is
    not finite the weight stays unchanged, without decay.
    """
    assert w_mn.shape == (p.rows, q.rows) and delta_dd.shape == (p.d, q.d), (w_mn.shape, delta_dd.shape, p.d, q.d)
    how = Store(rounding, None, offset, seed, step)
    how.check(w_mn)
    run = blocks_triton_ if use_kernel(w_mn.device) and is_one_stage(p, q) else decompress_add_reference_
    with on_device(w_mn):
        run(w_mn, delta_dd.contiguous(), p, q, number(alpha), number(keep), how)
