"""What low-rank factors add to a linear layer, for several versions of one of the factors at once.

    y_l = x_l (W + B_l V^T)^T + b_l  =  x_l W^T + (x_l V) B_l^T + b_l        l = 1 .. L

x_1 .. x_L are the rows of L looks, one below the other, so x W^T is one product for all of them; B_l and b_l differ
(those of w + eps z, w - eps z, ..). B_l V^T is never computed. The small part takes two kernels before the product:

    narrow    p = x V              [M, r] float32     reads x once: M I numbers
    widen     y = p B_l^T + b_l    [M, O]             writes y once; the product then adds to it in place

So y is written and read once more beside the product, and x read once more: for O = I = 5120 and 2048 rows in 16 bit
63 MB, against 107 GFLOP. y holds the small part before the large one is added to it in
float32, and the sum is rounded once. (The textbook computes W + B_l V^T for each l: 2 O I written and read per l.)

Sums differ from the reference's by rounding; the order of a sum is the same in every launch.
Legend: L looks, M rows of each, I inputs, O outputs, r rank.
"""

from typing import Any

import torch

from keyhole.ops.backend import INTERPRETED, jit, on_device, tl, use_kernel
from keyhole.ops.rounding.round import round_nearest

ROWS_IN, DEPTH, STAGES = 16, 256, 5  # few programs, so each must have many loads in flight
LEAST = 16  # minimum number of columns of tl.dot
FEW = 4  # ranks up to this are summed without tl.dot, which would multiply by twelve columns of zeros
FEW_ROWS, FEW_DEPTH, FEW_WARPS = 2, 1024, 2
ROWS_OUT, COLUMNS, WARPS_OUT = 16, 512, 4  # of a tile of y; above a rank of 2, half the rows and twice the columns

_INTERPRETED = tl.constexpr(INTERPRETED)


def narrow_reference(x_MI: torch.Tensor, v_rI: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x_MI.device.type, enabled=False):
        return x_MI.float() @ v_rI.float().t()


def widen_reference(
    p_LMr: torch.Tensor, b_LrO: torch.Tensor, bias_LO: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    with torch.autocast(p_LMr.device.type, enabled=False):
        if bias_LO is None:
            return torch.bmm(p_LMr, b_LrO).to(dtype)
        return torch.baddbmm(bias_LO[:, None, :].float(), p_LMr, b_LrO).to(dtype)


@jit()
def _narrow_kernel(
    x_ptr, v_ptr, p_ptr, M, width, r,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: all of some rows."""
    row, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
    at = x_ptr + row.to(tl.int64)[:, None] * width
    total = tl.zeros([ROWS, RANK], tl.float32)
    for start in range(0, width, DEPTH):
        i = start + tl.arange(0, DEPTH)
        x = tl.load(at + i[None, :], (row < M)[:, None] & (i < width)[None, :], 0.0)
        v = tl.load(v_ptr + j[None, :] * width + i[:, None], (j < r)[None, :] & (i < width)[:, None], 0.0)
        if _INTERPRETED:  # the interpreter has no product of 16-bit numbers
            x, v = x.to(tl.float32), v.to(tl.float32)
        total += tl.dot(x, v, input_precision=PRECISION)
    tl.store(p_ptr + row[:, None] * r + j[None, :], total, (row < M)[:, None] & (j < r)[None, :])


@jit()
def _narrow_few_kernel(
    x_ptr, v_ptr, p_ptr, M, width, r, ROWS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """The same for a rank of 1 to 4: a sum per row and column; each element of x is used when it is read."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * width
    sum_0 = tl.zeros([ROWS, DEPTH], tl.float32)
    sum_1, sum_2, sum_3 = sum_0, sum_0, sum_0
    for start in range(0, width, DEPTH):
        i = start + tl.arange(0, DEPTH)
        inside = (row < M)[:, None] & (i < width)[None, :]
        x = tl.load(x_ptr + at + i[None, :], inside, 0.0).to(tl.float32)
        sum_0 += x * tl.load(v_ptr + i, i < width, 0.0).to(tl.float32)[None, :]
        if RANK > 1:
            sum_1 += x * tl.load(v_ptr + width + i, i < width, 0.0).to(tl.float32)[None, :]
        if RANK > 2:
            sum_2 += x * tl.load(v_ptr + 2 * width + i, i < width, 0.0).to(tl.float32)[None, :]
        if RANK > 3:
            sum_3 += x * tl.load(v_ptr + 3 * width + i, i < width, 0.0).to(tl.float32)[None, :]
    tl.store(p_ptr + row * r, tl.sum(sum_0, axis=1), row < M)
    if RANK > 1:
        tl.store(p_ptr + row * r + 1, tl.sum(sum_1, axis=1), row < M)
    if RANK > 2:
        tl.store(p_ptr + row * r + 2, tl.sum(sum_2, axis=1), row < M)
    if RANK > 3:
        tl.store(p_ptr + row * r + 3, tl.sum(sum_3, axis=1), row < M)


@jit()
def _widen_kernel(
    p_ptr, b_ptr, bias_ptr, y_ptr, M, width, r, p_stride, b_stride, bias_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the y of one look. RANK: r if it is small, so that all loads are issued at once, or 0."""
    one = tl.program_id(2)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + one.to(tl.int64) * bias_stride + column, column < width, 0.0)
        total += bias.to(tl.float32)[None, :]
    p_ptr += one.to(tl.int64) * M * p_stride
    b_ptr += one.to(tl.int64) * b_stride
    if RANK > 0:
        for j in tl.static_range(RANK):
            p = tl.load(p_ptr + row * p_stride + j, row < M, 0.0)
            b = tl.load(b_ptr + j * width + column, column < width, 0.0)
            total += p[:, None] * b[None, :]
    else:
        for j in range(r):
            p = tl.load(p_ptr + row * p_stride + j, row < M, 0.0)
            b = tl.load(b_ptr + j * width + column, column < width, 0.0)
            total += p[:, None] * b[None, :]
    at = (one.to(tl.int64) * M + row)[:, None] * width + column[None, :]
    y = round_nearest(total, y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, (row < M)[:, None] & (column < width)[None, :])


def narrow(x_MI: torch.Tensor, v_rI: torch.Tensor) -> torch.Tensor:
    """x V as float32 [M, r]. x, v: contiguous, of one dtype."""
    (rows, width), rank = x_MI.shape, v_rI.shape[0]
    assert x_MI.is_contiguous() and v_rI.is_contiguous() and v_rI.shape[1] == width, (x_MI.shape, v_rI.shape)
    if not use_kernel(x_MI.device) or not rows:
        return narrow_reference(x_MI, v_rI)
    p_Mr = torch.empty(rows, rank, device=x_MI.device)
    if rank <= FEW:
        flags: dict[str, Any] = {"ROWS": FEW_ROWS, "DEPTH": FEW_DEPTH, "RANK": rank, "num_warps": FEW_WARPS}
        with on_device(x_MI):
            grid = (-(-rows // FEW_ROWS),)
            _narrow_few_kernel[grid](x_MI, v_rI, p_Mr, rows, width, rank, **flags, enable_fp_fusion=False)
        return p_Mr
    wide = max(LEAST, 1 << (rank - 1).bit_length())
    depth = DEPTH if x_MI.element_size() == 2 else DEPTH // 2
    flags = {"ROWS": ROWS_IN, "DEPTH": max(LEAST, depth * LEAST // wide), "RANK": wide, "PRECISION": "ieee"}
    with on_device(x_MI):
        options = {"num_warps": 4, "num_stages": STAGES, "enable_fp_fusion": False}
        _narrow_kernel[(-(-rows // ROWS_IN),)](x_MI, v_rI, p_Mr, rows, width, rank, **flags, **options)
    return p_Mr


def widen(p_LMr: torch.Tensor, b_LrO: torch.Tensor, bias_LO: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """p B^T + b as [L, M, O] in this dtype. p: float32, contiguous; b: float32, contiguous for each look."""
    (looks, rows, rank), width = p_LMr.shape, b_LrO.shape[2]
    assert b_LrO.shape[:2] == (looks, rank) and p_LMr.is_contiguous(), (p_LMr.shape, b_LrO.shape, p_LMr.stride())
    assert b_LrO[0].is_contiguous() and (bias_LO is None or bias_LO.shape == (looks, width)), b_LrO.stride()
    if not use_kernel(p_LMr.device) or not rows:
        return widen_reference(p_LMr, b_LrO, bias_LO, dtype)
    y_LMO = torch.empty(looks, rows, width, dtype=dtype, device=p_LMr.device)
    strides = p_LMr.stride(1), b_LrO.stride(0), 0 if bias_LO is None else bias_LO.stride(0)
    high, wide = (ROWS_OUT, COLUMNS) if rank <= 2 else (ROWS_OUT // 2, 2 * COLUMNS)
    grid = (-(-rows // high), -(-width // wide), looks)
    with on_device(p_LMr):
        tile = {"ROWS": high, "COLUMNS": wide, "num_warps": WARPS_OUT, "enable_fp_fusion": False}
        tile |= {"RANK": rank if rank <= FEW else 0}
        _widen_kernel[grid](p_LMr, b_LrO, bias_LO, y_LMO, rows, width, rank, *strides, **tile)
    return y_LMO
