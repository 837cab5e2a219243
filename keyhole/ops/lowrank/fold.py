"""Folding: W <- round(W + A V^T), in place, for low-rank factors.

    w_ij <- round(w_ij + (a_0i v_0j + a_1i v_1j + ... ))        summed in order, in float32, no fused multiply-add

It is elementwise, so kernel and reference give the same bits, and a fold that is recomputed from a journal, on any
device, gives the run's weights. The rounding is that of rounding/store.py: nearest, or stochastic with the bits of
rounding/bits.py (a program processes a strip of 128 rows, 16 at a time), a function of (seed, step, element). A part
of a matrix that begins at a multiple of 128 rows gets the same bits as these rows of the whole matrix.

Bytes per 16-bit weight: 2 read + 2 written; the factors are read from cache. Operations: r products and sums.
Legend: R rows, C columns of W; r the rank; a [r, R] float32, v [r, C].
"""

from typing import Any

import torch

from keyhole.ops.arguments import Scalar
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.noise.words import key, unsigned
from keyhole.ops.rounding.bits import LANE_ROWS, LANES, STRIP_ROWS, bits2d_reference, lane_bits, strip_words
from keyhole.ops.rounding.store import Store, store_weight, store_weight_reference_

COLUMNS = 128

_LANE_ROWS, _LANES = tl.constexpr(LANE_ROWS), tl.constexpr(LANES)


def fold_reference_(w_RC: torch.Tensor, a_rR: torch.Tensor, v_rC: torch.Tensor, how: Store) -> None:
    """Sums row by row of the factors."""
    total = a_rR[0].float()[:, None] * v_rC[0].float()[None, :]
    for a_R, v_C in zip(a_rR[1:], v_rC[1:], strict=True):
        total += a_R.float()[:, None] * v_C.float()[None, :]
    which: dict[str, Any] = {"offset": how.offset, "seed": how.seed, "step": int(how.step), "device": w_RC.device}
    bits = bits2d_reference(*w_RC.shape, **which) if how.is_stochastic(w_RC.dtype) else None
    everywhere = torch.ones((), dtype=torch.bool, device=w_RC.device)
    store_weight_reference_(w_RC, None, w_RC.to(torch.float32) + total, everywhere, bits, how)


@jit(do_not_specialize=["offset", "step", "k0", "k1"])
def _fold_kernel(
    w_ptr, a_ptr, v_ptr, changed_ptr, m, n, r, offset, step, k0, k1,
    STOCHASTIC: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: a strip of 128 rows, some columns."""
    strip, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    words = strip_words(strip, column, n, offset, unsigned(step, k0, k1), STOCHASTIC)
    count = strip * 0
    for lane in range(_LANES):
        row = (strip * _LANES + lane) * _LANE_ROWS + tl.arange(0, _LANE_ROWS)
        mask = (row < m)[:, None] & (column < n)[None, :]
        a = tl.load(a_ptr + row, row < m, 0.0).to(tl.float32)
        v = tl.load(v_ptr + column, column < n, 0.0).to(tl.float32)
        total = a[:, None] * v[None, :]
        for i in range(1, r):
            a = tl.load(a_ptr + i * m + row, row < m, 0.0).to(tl.float32)
            v = tl.load(v_ptr + i * n + column, column < n, 0.0).to(tl.float32)
            total += a[:, None] * v[None, :]
        at = row.to(tl.int64)[:, None] * n + column[None, :]
        w = tl.load(w_ptr + at, mask, 0.0)
        bits = words[0]
        if STOCHASTIC:
            bits = lane_bits(words, lane)
        moved = store_weight(w_ptr + at, None, mask, mask, w, w.to(tl.float32) + total, bits, STOCHASTIC)
        if changed_ptr is not None:
            count += tl.sum(tl.sum(moved, 1))
    if changed_ptr is not None:
        tl.atomic_add(changed_ptr, count.to(tl.int64))


def fold_(
    w_RC: torch.Tensor,
    a_rR: torch.Tensor,
    v_rC: torch.Tensor,
    *,
    offset: int = 0,
    first_row: int = 0,
    seed: int = 0,
    step: int = 0,
    rounding: str = "nearest",
    changed: Scalar = None,
) -> None:
    """w <- round(w + sum_i a_i v_i^T), in place.

    w: contiguous [R, C], float32 | bfloat16 | float16; a, v: contiguous, any of these. offset: global index of the
    matrix's first element; first_row: where w begins in it, a multiple of 128. changed (int64 scalar): the number of
    stored values that changed is added.
    """
    (rows, columns), rank = w_RC.shape, a_rR.shape[0]
    assert a_rR.shape == (rank, rows) and v_rC.shape == (rank, columns), (w_RC.shape, a_rR.shape, v_rC.shape)
    assert rank and a_rR.is_contiguous() and v_rC.is_contiguous() and first_row % STRIP_ROWS == 0, (rank, first_row)
    how = Store(rounding, None, offset + first_row // LANES * columns, seed, step, changed)
    how.check(w_RC)
    with on_device(w_RC):
        if not use_kernel(w_RC.device):
            return fold_reference_(w_RC, a_rR, v_rC, how)
        grid = (-(-rows // STRIP_ROWS), -(-columns // COLUMNS))
        numbers = (rows, columns, rank, how.offset, *key(seed, step))
        flags = {"STOCHASTIC": how.is_stochastic(w_RC.dtype), "COLUMNS": COLUMNS}
        _fold_kernel[grid](w_RC, a_rR, v_rC, changed, *numbers, **flags, num_warps=4, enable_fp_fusion=False)
