"""Decompressing: W <- round(keep W + alpha P delta Q^T), in place.

For blocks on both sides there is one stage: blocks.py.

For drawn positions (free, runs), and for two different kinds, there are two stages:

    1. E = delta Q^T       [d_P, n]   float32: the step, decompressed on one side
    2. row i of W:         w_i <- round(keep w_i + alpha sum_k P[i, k] E[column(i, k), :])

One stage would gather r^2 numbers for every weight; two stages gather r for each of d n, then r for each of m n, and
stage 2 always reads whole rows of E: memory accesses are contiguous for every kind of projector. The tiles of W that
share columns of E run at the same time, so that E is read from cache (d 512 bytes for 128 columns).

Bytes per bfloat16 weight: 2 read + 2 written, and 4 r from cache. `keep` is 1 - lr wd, 1 without weight decay.
All arithmetic is float32; the rounding is that of rounding/store.py: nearest, stochastic (with the bits of
rounding/bits2d.py: a program processes a strip of 128 rows, 16 at a time) or kahan (then y = c + alpha (..) +
(keep - 1) w). Reference and kernel differ by the rounding of the sums.
Legend: m, n sides of W; A rows of delta (d of P), d columns (d of Q), r entries per row.
"""

from typing import Any

import torch

from keyhole.ops.arguments import Count, Number, Scalar, is_on_device, number
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.lsp.blocks import blocks_triton_, is_one_stage, move
from keyhole.ops.lsp.projector import Projector
from keyhole.ops.noise.index import key, unsigned
from keyhole.ops.rounding.bits2d import LANE_ROWS, LANES, STRIP_ROWS, bits2d_reference, lane_bits, strip_words
from keyhole.ops.rounding.store import Store, store_weight_reference_

ROWS, COLUMNS = 32, 128  # of a tile of E; a tile of W has LANE_ROWS rows

_LANE_ROWS, _LANES = tl.constexpr(LANE_ROWS), tl.constexpr(LANES)


def expand_reference(delta_Ad: torch.Tensor, q: Projector, out_An: torch.Tensor) -> None:
    """delta Q^T."""
    columns_nr = q.columns_Rr()
    out_An.zero_()
    for k in range(q.r):
        out_An += delta_Ad[:, columns_nr[:, k]].to(torch.float32) * q.values_Rr[:, k]


def apply_reference_(
    w_mn: torch.Tensor, wide_An: torch.Tensor, p: Projector, alpha: Number, keep: Number, how: Store
) -> None:
    """Stage 2."""
    alpha, keep = float(alpha), float(keep)
    columns_mr, w_fp32_mn, c_mn = p.columns_Rr(), w_mn.to(torch.float32), how.compensation
    moved_mn = torch.zeros_like(w_fp32_mn)
    for k in range(p.r):
        moved_mn += p.values_Rr[:, k, None] * wide_An[columns_mr[:, k]]
    x_mn = w_fp32_mn * keep + moved_mn * alpha
    if c_mn is not None:
        x_mn = c_mn + (moved_mn * alpha + w_fp32_mn * (keep - 1))
    which: dict[str, Any] = {"offset": how.offset, "seed": how.seed, "step": int(how.step), "device": w_mn.device}
    bits = bits2d_reference(*w_mn.shape, **which) if how.is_stochastic(w_mn.dtype) else None
    store_weight_reference_(w_mn, c_mn, x_mn, torch.isfinite(moved_mn), bits, how)


@jit()
def _column(runs_ptr, row, k, mask, r, group, RUN: tl.constexpr, BLOCKS: tl.constexpr):
    """The column of the k-th entry of these rows."""
    if BLOCKS:
        column = row // group * r + k
    else:
        column = tl.load(runs_ptr + row // RUN * r + k, mask, 0) * RUN + row % RUN
    return column


@jit()
def _expand_kernel(
    delta_ptr, values_ptr, runs_ptr, out_ptr,
    A, n, d, r, group, RUN: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
def _apply_kernel(
    w_ptr, c_ptr, wide_ptr, values_ptr, runs_ptr, changed_ptr,
    m, n, r, group, alpha, keep, offset, step, k0, k1,
    RUN: tl.constexpr, BLOCKS: tl.constexpr, STOCHASTIC: tl.constexpr, ON_DEVICE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stage 2, one program: a strip of some columns of W. ON_DEVICE: alpha, keep and step are pointers."""
    if ON_DEVICE:
        alpha, keep, step = tl.load(alpha), tl.load(keep), tl.load(step)
    strip, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    words = strip_words(strip, column, n, offset, unsigned(step, k0, k1), STOCHASTIC)
    changes, rates = tl.zeros([_LANE_ROWS, COLUMNS], tl.int32), (alpha, keep)
    for lane in range(_LANES):
        row = (strip * _LANES + lane) * _LANE_ROWS + tl.arange(0, _LANE_ROWS)
        mask = (row < m)[:, None] & (column < n)[None, :]
        total = tl.zeros([_LANE_ROWS, COLUMNS], tl.float32)
        for i in range(r):
            source = _column(runs_ptr, row, i, row < m, r, group, RUN, BLOCKS).to(tl.int64)
            value = tl.load(values_ptr + row * r + i, row < m, 0.0)
            total += value[:, None] * tl.load(wide_ptr + source[:, None] * n + column[None, :], mask, 0.0)
        at, bits, c_at = row.to(tl.int64)[:, None] * n + column[None, :], words[0], c_ptr
        if STOCHASTIC:
            bits = lane_bits(words, lane)
        if c_ptr is not None:
            c_at = c_ptr + at
        w = tl.load(w_ptr + at, mask, 0.0)
        changes = move(w_ptr + at, c_at, mask, w, total, rates, bits, changes, STOCHASTIC, False)
    if changed_ptr is not None:
        tl.atomic_add(changed_ptr, tl.sum(tl.sum(changes, 1)).to(tl.int64))


def apply_triton_(
    w_mn: torch.Tensor, wide_An: torch.Tensor, p: Projector, alpha: Number, keep: Number, how: Store
) -> None:
    """Stage 2 by kernel."""
    m, n = w_mn.shape
    tensors = (w_mn, how.compensation, wide_An, p.values_Rr, p.runs, how.changed)
    numbers = (m, n, p.r, p.group, alpha, keep, how.offset, *key(how.seed, how.step))
    flags = {"RUN": p.run, "BLOCKS": p.group > 0, "STOCHASTIC": how.is_stochastic(w_mn.dtype), "COLUMNS": COLUMNS}
    flags["ON_DEVICE"] = is_on_device(alpha, keep, how.step)
    grid = (-(-m // STRIP_ROWS), -(-n // COLUMNS))
    _apply_kernel[grid](*tensors, *numbers, **flags, num_warps=4, enable_fp_fusion=False)


def expand(delta_Ad: torch.Tensor, q: Projector) -> torch.Tensor:
    """Stage 1: delta Q^T as float32 [A, n]."""
    assert delta_Ad.shape[1] == q.d and delta_Ad.is_contiguous(), (delta_Ad.shape, q.d)
    A, n = delta_Ad.shape[0], q.rows
    out_An = torch.empty(A, n, device=delta_Ad.device)
    if not use_kernel(delta_Ad.device):
        expand_reference(delta_Ad, q, out_An)
        return out_An
    tile = {"RUN": q.run, "BLOCKS": q.group > 0, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4}
    tensors, grid = (delta_Ad, q.values_Rr, q.runs, out_An), (-(-n // COLUMNS), -(-A // ROWS))
    _expand_kernel[grid](*tensors, A, n, q.d, q.r, q.group, **tile, enable_fp_fusion=False)
    return out_An


def decompress_add_(
    w_mn: torch.Tensor,
    delta_dd: torch.Tensor,
    p: Projector,
    q: Projector,
    alpha: Number,
    *,
    keep: Number = 1.0,
    rounding: str = "nearest",
    compensation: torch.Tensor | None = None,
    offset: int = 0,
    seed: int = 0,
    step: Count = 0,
    changed: Scalar = None,
) -> None:
    """w <- round(keep w + alpha P delta Q^T), in place.

    w: contiguous [m, n], float32 | bfloat16 | float16; delta: contiguous [d_P, d_Q], any of these. offset: global
    index of w's first element. compensation: with rounding "kahan", like w. changed (int64 scalar): the number of
    stored values that changed is added. alpha, keep and step: values, or all three as tensors on the device. Where the
    step is not finite the weight stays unchanged, without decay.
    """
    assert w_mn.shape == (p.rows, q.rows) and delta_dd.shape == (p.d, q.d), (w_mn.shape, delta_dd.shape, p.d, q.d)
    how = Store(rounding, compensation, offset, seed, step, changed)
    how.check(w_mn)
    alpha, keep = number(alpha), number(keep)
    with on_device(w_mn):
        if use_kernel(w_mn.device) and is_one_stage(p, q):
            return blocks_triton_(w_mn, delta_dd.contiguous(), p, q, alpha, keep, how)
        run = apply_triton_ if use_kernel(w_mn.device) else apply_reference_
        run(w_mn, expand(delta_dd, q), p, alpha, keep, how)
