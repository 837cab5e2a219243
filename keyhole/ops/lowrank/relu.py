"""A ReLU that adds what the product before it lacks, and makes the sketch for the layer after it.

    x_l = max(round(y_l + p_l B_l^T + b_l), 0)      y lacks its small part (correct.py); or x = max(y, 0)
    q   = x V                  [M, r] float32       what the layer after it needs before its product (product.py)

A ReLU has every x in a register, so q costs no read of x; and y is read anyway, so the small part needs no `widen`:

                                   written and read, M O numbers each     2048 x 20480 in 16 bit
    widen, product, ReLU, narrow   y; y, y; y, x; x               6       503 MB
    product, narrow_relu           y; y, x                        3       252 MB

One program has a tile of y: ROWS x COLUMNS. It reads y and writes x once, and reads B_l, b_l and V for its columns from
the L2 cache: 4 r + 4 + 2 r bytes per column, beside 4 ROWS of y and x (16 each for r = 2). With 256 columns
for each warp, a thread has 8 adjacent columns of all rows: it loads their B_l, b_l and V once, into registers, and all
its loads are issued before it waits for one. (If warps share columns, the compiler moves B_l, b_l and V through shared
memory, one after the other. If a program has whole rows, it has few of them, and B_l alone is as many bytes as y: that
took 81 to 138 us, `widen` and a ReLU with its sketch 27 + 47, and the bytes of y and x take 39.)

A tile has a part of the sum over the columns only. So it stores its part of q, and a second kernel adds them:

    parts[t] = x[:, tile t] V[tile t]      [O / COLUMNS, M, r] float32: 0.7 MB for 40 tiles, r = 2
    q = parts[0] + parts[1] + ..           in this order

Everything is computed in float32. x is rounded before it is multiplied by V: q is the sketch of what the layer reads.
(The kernel takes the maximum first, which is the same, because rounding keeps the order of numbers.) x has the same
bits whether y was corrected on the way, or in place before. So has q: tiles, and with them the order of its sums,
depend on shapes alone. V with more than FEW columns is for tl.dot: the kernel makes x only, and `narrow` reads it.

Sums differ from the reference's by rounding; their order is the same in every launch.
Legend: L looks, M rows of all looks together, O outputs of the product (inputs of the layer after it), r rank.
"""

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.lowrank.correct import UNROLLED, Small, check_small_part, correct_reference, small_part
from keyhole.ops.lowrank.product import FEW, narrow, narrow_reference
from keyhole.ops.rounding.round import round_nearest

ROWS, COLUMNS, WARPS = 4, 512, 2  # of a tile of y; all ranks have the same, so that q does not depend on what y lacks
NUMBERS, ADD_WARPS = 64, 2  # of q, per program that adds parts
AT_ONCE = 16  # parts whose loads are issued together; the order of the sum does not depend on it


def narrow_relu_reference(
    y_MO: torch.Tensor, v_rO: torch.Tensor, lacks: Small | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(y, 0), and its product with V in float32. lacks: what is added to y before."""
    y_MO = y_MO if lacks is None else correct_reference(y_MO, *lacks)
    return (x_MO := torch.relu(y_MO)), narrow_reference(x_MO, v_rO)


@jit()
def _relu_kernel(
    y_ptr, p_ptr, b_ptr, bias_ptr, v_ptr, x_ptr, parts_ptr, M, width, r, p_stride, b_stride, bias_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LACKS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the rows of one look. p_ptr: None if y lacks nothing. M: rows of each look; r: rank of p,
    LACKS: the same if it is small, or 0. RANK: number of columns of V, up to FEW; 0: no sketch. (All loads come first:
    the compiler cannot move them above a store, or above a sum, in which warps wait for each other.)"""
    one, tile = tl.program_id(2), tl.program_id(1)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS)
    at = (one.to(tl.int64) * M + row)[:, None] * width + column[None, :]
    there = column < width
    inside = (row < M)[:, None] & there[None, :]
    x = tl.load(y_ptr + at, inside, 0.0).to(tl.float32)
    if RANK > 0:
        v_0 = tl.load(v_ptr + column, there, 0.0)
    if RANK > 1:
        v_1 = tl.load(v_ptr + width + column, there, 0.0)
    if RANK > 2:
        v_2 = tl.load(v_ptr + 2 * width + column, there, 0.0)
    if RANK > 3:
        v_3 = tl.load(v_ptr + 3 * width + column, there, 0.0)
    if p_ptr is not None:
        x += small_part(
            p_ptr, b_ptr, bias_ptr, one, row, column, M, width, r, p_stride, b_stride, bias_stride, ROWS, COLUMNS, LACKS
        )
    x = round_nearest(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), x_ptr.dtype.element_ty)
    if RANK > 0:
        sum_0 = tl.sum(x.to(tl.float32) * v_0.to(tl.float32)[None, :], axis=1)
    if RANK > 1:
        sum_1 = tl.sum(x.to(tl.float32) * v_1.to(tl.float32)[None, :], axis=1)
    if RANK > 2:
        sum_2 = tl.sum(x.to(tl.float32) * v_2.to(tl.float32)[None, :], axis=1)
    if RANK > 3:
        sum_3 = tl.sum(x.to(tl.float32) * v_3.to(tl.float32)[None, :], axis=1)
    tl.store(x_ptr + at, x, inside)
    part = ((tile * tl.num_programs(2) + one) * M + row) * RANK
    if RANK > 0:
        tl.store(parts_ptr + part, sum_0, row < M)
    if RANK > 1:
        tl.store(parts_ptr + part + 1, sum_1, row < M)
    if RANK > 2:
        tl.store(parts_ptr + part + 2, sum_2, row < M)
    if RANK > 3:
        tl.store(parts_ptr + part + 3, sum_3, row < M)


@jit()
def _add_kernel(parts_ptr, q_ptr, count, tiles, NUMBERS: tl.constexpr, AT_ONCE: tl.constexpr):
    """One program: some numbers of q, whose parts are added in ascending order."""
    i = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    total = tl.zeros([NUMBERS], tl.float32)
    for first in range(0, tiles, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            at = (first + k) * count + i
            total += tl.load(parts_ptr + at, (i < count) & (at < tiles * count), 0.0)
    tl.store(q_ptr + i, total, i < count)


def narrow_relu(
    y_MO: torch.Tensor, v_rO: torch.Tensor, lacks: Small | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(max(y, 0), its product with V as float32 [M, r]). y, v: contiguous, of one dtype. lacks: what is added to y
    before, and rounded; y itself stays as it is. Its p, B and b are as for `widen`."""
    (rows, width), rank = y_MO.shape, v_rO.shape[0]
    assert y_MO.is_contiguous() and v_rO.is_contiguous() and v_rO.shape[1] == width, (y_MO.shape, v_rO.shape)
    assert y_MO.dtype == v_rO.dtype, (y_MO.dtype, v_rO.dtype)
    if lacks is not None:
        check_small_part(*lacks)
        looks, look_rows, _ = lacks[0].shape
        assert (looks * look_rows, lacks[1].shape[2]) == (rows, width), (y_MO.shape, lacks[0].shape, lacks[1].shape)
    if not use_kernel(y_MO.device) or not rows:
        return narrow_relu_reference(y_MO, v_rO, lacks)
    x_MO, tiles = torch.empty_like(y_MO), -(-width // COLUMNS)
    if rank > FEW:
        _launch(y_MO, None, lacks, x_MO, None)
        return x_MO, narrow(x_MO, v_rO)
    parts_tMr = torch.empty(tiles, rows, rank, device=y_MO.device)
    _launch(y_MO, v_rO, lacks, x_MO, parts_tMr)
    if tiles == 1:
        return x_MO, parts_tMr[0]
    q_Mr = torch.empty(rows, rank, device=y_MO.device)
    with on_device(y_MO):
        options = {"NUMBERS": NUMBERS, "AT_ONCE": AT_ONCE, "num_warps": ADD_WARPS, "enable_fp_fusion": False}
        _add_kernel[(-(-q_Mr.numel() // NUMBERS),)](parts_tMr, q_Mr, q_Mr.numel(), tiles, **options)
    return x_MO, q_Mr


def _launch(
    y_MO: torch.Tensor,
    v_rO: torch.Tensor | None,
    lacks: Small | None,
    x_MO: torch.Tensor,
    parts_tMr: torch.Tensor | None,
) -> None:
    """v, parts: None if no sketch is made."""
    width = y_MO.shape[1]
    small: Small | tuple[None, None, None] = (None, None, None)
    looks, rows, own, strides = 1, len(y_MO), 0, (0, 0, 0)
    if lacks is not None:
        small, (p_LMr, b_LrO, bias_LO) = lacks, lacks
        looks, rows, own = p_LMr.shape
        strides = p_LMr.stride(1), b_LrO.stride(0), 0 if bias_LO is None else bias_LO.stride(0)
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS, "enable_fp_fusion": False}
    tile |= {"LACKS": own if own <= UNROLLED else 0, "RANK": 0 if v_rO is None else v_rO.shape[0]}
    grid = (-(-rows // ROWS), -(-width // COLUMNS), looks)
    with on_device(y_MO):
        _relu_kernel[grid](y_MO, *small, v_rO, x_MO, parts_tMr, rows, width, own, *strides, **tile)
