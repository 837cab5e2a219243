"""Decompressing: W <- round(keep W + alpha P delta Q^T), in place, in two stages.

    1. E = delta Q^T       [d_P, n]   float32: the step, wide already, but in the rows of the subspace
    2. row i of W:         w_i <- round(keep w_i + alpha sum_k P[i, k] E[column(i, k), :])

One stage would gather r^2 numbers for every weight; two gather r for each of d n, then r for each of m n, and in
stage 2 always whole rows of E: memory moves in one piece for every kind of projector. The tiles of W that share
columns of E run side by side, so that E comes out of cache (d 512 bytes for 128 columns). For blocks, stage 2 is a
batch of products [g, r] [r, n], and E is read once.

Bytes a bfloat16 weight: 2 read + 2 written, and 4 r from cache. `keep` is 1 - lr wd where weight decay is wanted.
All arithmetic is float32; the rounding is that of lomo.py, by the element's global index: nearest, stochastic or
kahan (then y = c + alpha (..) + (keep - 1) w). Reference and kernel differ by the rounding of the sums.
Legend: m, n sides of W; A rows of delta (d of P), d columns (d of Q), r numbers a row.
"""

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.lomo import ROUNDINGS, bits_reference, check_scalars, check_tensors, settle, settle_reference
from keyhole.ops.project import power_of_two
from keyhole.ops.projector import Projector
from keyhole.ops.rounding import bits_at
from keyhole.ops.tiles import check, int32, key
from keyhole.ops.zo import float32

ROWS, COLUMNS = 32, 128  # of a tile of E or of W


def expand_reference(delta_Ad: torch.Tensor, q: Projector, out_An: torch.Tensor) -> None:
    """delta Q^T."""
    columns_nr = q.columns_Rr()
    out_An.zero_()
    for k in range(q.r):
        out_An += delta_Ad[:, columns_nr[:, k]].to(torch.float32) * q.values_Rr[:, k]


def apply_reference_(w_mn: torch.Tensor, wide_An: torch.Tensor, p: Projector, c_mn: torch.Tensor | None, *,
                     alpha: float, keep: float, stochastic: bool, offset: int, seed: int, step: int,
                     changed: torch.Tensor | None) -> None:
    """Stage 2."""
    columns_mr, w_fp32_mn = p.columns_Rr(), w_mn.to(torch.float32)
    moved_mn = torch.zeros_like(w_fp32_mn)
    for k in range(p.r):
        moved_mn += p.values_Rr[:, k, None] * wide_An[columns_mr[:, k]]
    x_mn = w_fp32_mn * keep + moved_mn * alpha
    if c_mn is not None:
        x_mn = c_mn + (moved_mn * alpha + w_fp32_mn * (keep - 1))
    bits = bits_reference(w_mn, offset, seed, step) if stochastic else None
    new_mn, c_new_mn = settle_reference(w_mn, x_mn, c_mn, bits)
    if changed is not None:
        changed += (new_mn != w_mn).sum()
    if c_mn is not None:
        c_mn.copy_(c_new_mn)
    w_mn.copy_(new_mn)


@jit()
def _column(runs_ptr, row, k, mask, r, group, RUN: tl.constexpr, BLOCKS: tl.constexpr):
    """The column of the k-th number of these rows."""
    if BLOCKS:
        column = row // group * r + k
    else:
        column = tl.load(runs_ptr + row // RUN * r + k, mask, 0) * RUN + row % RUN
    return column


@jit()
def _expand_kernel(delta_ptr, values_ptr, runs_ptr, out_ptr, A, n, d, r, group, RUN: tl.constexpr,
                   BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stage 1, one program: a tile of E."""
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask, at = (row < A)[:, None] & (column < n)[None, :], row.to(tl.int64)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(r):
        source = _column(runs_ptr, column, k, column < n, r, group, RUN, BLOCKS)
        value = tl.load(values_ptr + column * r + k, column < n, 0.0)
        total += tl.load(delta_ptr + at * d + source[None, :], mask, 0.0).to(tl.float32) * value[None, :]
    tl.store(out_ptr + at * n + column[None, :], total, mask)


@jit(do_not_specialize=["alpha", "keep", "offset", "step", "k0", "k1"])
def _apply_kernel(w_ptr, c_ptr, wide_ptr, values_ptr, runs_ptr, changed_ptr, m, n, r, group, chunks, alpha, keep,
                  offset, step, k0, k1, RUN: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
                  STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stage 2, one program: a tile of W (of one block, cut into `chunks` tiles, where there are blocks)."""
    step, k0, k1 = step.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if BLOCKS:
        block = tl.program_id(0) // chunks
        row = block * group + tl.program_id(0) % chunks * ROWS + tl.arange(0, ROWS)
        exists, k = row < tl.minimum((block + 1) * group, m), tl.arange(0, WIDTH)
        value = tl.load(values_ptr + row[:, None] * r + k[None, :], exists[:, None] & (k < r)[None, :], 0.0)
        wide_ptr += (block * r).to(tl.int64) * n
        wide = tl.load(wide_ptr + k[:, None] * n + column[None, :], (k < r)[:, None] & (column < n)[None, :], 0.0)
        total = tl.dot(value, wide, input_precision="ieee")
        mask = exists[:, None] & (column < n)[None, :]
    else:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        mask = (row < m)[:, None] & (column < n)[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in range(r):
            source = _column(runs_ptr, row, i, row < m, r, group, RUN, False).to(tl.int64)
            value = tl.load(values_ptr + row * r + i, row < m, 0.0)
            total += value[:, None] * tl.load(wide_ptr + source[:, None] * n + column[None, :], mask, 0.0)
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    w = tl.load(w_ptr + at, mask, 0.0)
    x = w.to(tl.float32) * keep + total * alpha
    at_c = c_ptr
    if c_ptr is not None:
        at_c = c_ptr + at
        x = tl.load(at_c, mask, 0.0).to(tl.float32) + (total * alpha + w.to(tl.float32) * (keep - 1))
    bits = k0
    if STOCHASTIC:
        bits = bits_at(offset.to(tl.int64) + at, step, k0, k1)
    moved = settle(w_ptr + at, at_c, mask, mask, w, x, bits, STOCHASTIC)
    if changed_ptr is not None:
        tl.atomic_add(changed_ptr, tl.sum(tl.sum(moved, 1)).to(tl.int64))


def expand_triton(delta_Ad: torch.Tensor, q: Projector, out_An: torch.Tensor) -> None:
    """Stage 1 by kernel."""
    A, n = out_An.shape
    with on_device(delta_Ad):
        _expand_kernel[(-(-n // COLUMNS), -(-A // ROWS))](
            delta_Ad, q.values_Rr, q.runs, out_An, A, n, q.d, q.r, q.group, RUN=q.run, BLOCKS=q.group > 0, ROWS=ROWS,
            COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False)


def apply_triton_(w_mn: torch.Tensor, wide_An: torch.Tensor, p: Projector, c_mn: torch.Tensor | None, *, alpha: float,
                  keep: float, stochastic: bool, offset: int, seed: int, step: int,
                  changed: torch.Tensor | None) -> None:
    """Stage 2 by kernel."""
    (m, n), chunks = w_mn.shape, -(-p.group // ROWS)
    tiles = p.d // p.r * chunks if p.group else -(-m // ROWS)
    with on_device(w_mn):
        _apply_kernel[(tiles, -(-n // COLUMNS))](
            w_mn, c_mn, wide_An, p.values_Rr, p.runs, changed, m, n, p.r, p.group, chunks, alpha, keep, offset,
            int32(step), *key(seed), RUN=p.run, BLOCKS=p.group > 0, WIDTH=power_of_two(p.r), STOCHASTIC=stochastic,
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False)


def expand(delta_Ad: torch.Tensor, q: Projector) -> torch.Tensor:
    """delta Q^T as float32 [A, n]."""
    assert delta_Ad.shape[1] == q.d and delta_Ad.is_contiguous(), (delta_Ad.shape, q.d)
    out_An = torch.empty(delta_Ad.shape[0], q.rows, device=delta_Ad.device)
    (expand_triton if use_kernel(delta_Ad.device) else expand_reference)(delta_Ad, q, out_An)
    return out_An


def decompress_add_(w_mn: torch.Tensor, delta_dd: torch.Tensor, p: Projector, q: Projector, alpha: float, *,
                    keep: float = 1.0, rounding: str = "nearest", compensation: torch.Tensor | None = None,
                    offset: int = 0, seed: int = 0, step: int = 0, changed: torch.Tensor | None = None) -> None:
    """w <- round(keep w + alpha P delta Q^T), in place.

    w: contiguous [m, n], float32 | bfloat16 | float16; delta: contiguous [d_P, d_Q], any of these. offset: global
    index of w's first element. compensation: with rounding "kahan", like w. changed (int64 scalar): stored values
    that changed are added.
    """
    assert w_mn.shape == (p.rows, q.rows) and delta_dd.shape == (p.d, q.d), (w_mn.shape, delta_dd.shape, p.d, q.d)
    assert rounding in ROUNDINGS and (rounding == "kahan") == (compensation is not None), rounding
    check_tensors(w_mn, *(() if compensation is None else (compensation,)))
    check_scalars(w_mn.device, None, None, None, changed)
    check(offset, w_mn.numel(), seed, (step,), 0, "gaussian")
    run = apply_triton_ if use_kernel(w_mn.device) else apply_reference_
    run(w_mn, expand(delta_dd, q), p, compensation, alpha=float32(alpha), keep=float32(keep),
        stochastic=rounding == "stochastic" and w_mn.dtype != torch.float32, offset=offset, seed=seed, step=step,
        changed=changed)
