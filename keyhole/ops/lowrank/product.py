"""What low-rank factors add to a linear layer, for several versions of one of the factors at once.

    y_l = x_l (W + B_l V^T)^T + b_l  =  x_l W^T + (x_l V) B_l^T + b_l        l = 1 .. L

x_1 .. x_L are the rows of L looks, one below the other, so x W^T is one product for all of them; B_l and b_l differ
(those of w + eps z, w - eps z, ..). B_l V^T is never computed. The small part takes two kernels before the product:

    narrow    p = x V              [M, r] float32     reads x once: M I numbers
    widen     y = p B_l^T + b_l    [M, O]             writes y once; the product then adds to it in place

Where a ReLU made x, its kernel can compute p on the way, from numbers that it has in registers:

    narrow_relu    x = max(x', 0), p = x V     reads x' and writes x, as a ReLU does; narrow would read x once more

The product before that ReLU may lack its own small part (correct.py): x = max(round(x' + p' B_l^T + b_l), 0) then, and
that layer's `widen` is not needed. For 2048 x 20480 in 16 bit 168 MB less; B_l and b_l come from the L2 cache.

So beside the product y is written and read once more, and x read once more: for O = I = 5120 and 2048 rows in 16 bit
63 MB, against 107 GFLOP (21 MB, where what reads y adds the small part: correct.py). y holds the small part before the
large one is added to it in float32. (The textbook computes W + B_l V^T for each l: 2 O I written and read per l.)

Sums differ from the reference's by rounding; the order of a sum is the same in every launch.
Legend: L looks, M rows of each, I inputs, O outputs, r rank.
"""

import torch

from keyhole.ops.backend import INTERPRETED, jit, on_device, tl, use_kernel
from keyhole.ops.lowrank.correct import check_small_part, correct, correct_reference, small_part
from keyhole.ops.rounding.round import round_nearest

Small = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""(p [L, M, r], B [L, r, O], b [L, O]): what a product lacks, p B_l^T + b_l (correct.py)."""

ROWS_IN, DEPTH, STAGES = 16, 256, 5  # few programs, so each must have many loads in flight
LEAST = 16  # minimum number of columns of tl.dot
FEW = 4  # ranks up to this are summed without tl.dot, which would multiply by twelve columns of zeros
FEW_ROWS, FEW_DEPTH, FEW_WARPS = 2, 1024, 2
CORRECTED_ROWS, CORRECTED_DEPTH, CORRECTED_WARPS = 4, 1024, 4  # the same where x lacks p B_l^T + b_l
CORRECTED_AT_ONCE = True  # B is loaded once for all rows of a program, if they belong to one look
ROWS_OUT, COLUMNS, WARPS_OUT = 16, 512, 4  # of a tile of y; above a rank of 2, half the rows and twice the columns

_INTERPRETED = tl.constexpr(INTERPRETED)


def narrow_reference(x_MI: torch.Tensor, v_rI: torch.Tensor) -> torch.Tensor:
    """x V, in float32."""
    return x_MI.float() @ v_rI.float().t()


def widen_reference(
    p_LMr: torch.Tensor, b_LrO: torch.Tensor, bias_LO: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """p B^T + b."""
    y_LMO = torch.bmm(p_LMr, b_LrO) if bias_LO is None else torch.baddbmm(bias_LO[:, None, :].float(), p_LMr, b_LrO)
    return y_LMO.to(dtype)


def narrow_relu_reference(
    x_MI: torch.Tensor, v_rI: torch.Tensor, lacks: Small | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(x, 0), and its product with V in float32. lacks: what is added to x before."""
    x_MI = x_MI if lacks is None else correct_reference(x_MI, *lacks)
    return (y_MI := torch.relu(x_MI)), narrow_reference(y_MI, v_rI)


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
    x_ptr, v_ptr, p_ptr, relu_ptr, lacks_ptr, b_ptr, bias_ptr, M, width, r, look_rows, lacks_stride, b_stride,
    bias_stride, ROWS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, LACKS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """The same for a rank of 1 to 4: a sum per row and column; each element of x is used when it is read. relu_ptr:
    None, or where max(x, 0) is written, which then takes the place of x. (Stores come after loads, because the compiler
    cannot move a load above a store.)

    LACKS: the rank of what is added to x before, p (lacks_ptr) times B and a bias; 0: nothing. look_rows: of each look.
    ONE: the rows of a program belong to one look, so that each number of B is loaded once for all of them."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * width
    sum_0 = tl.zeros([ROWS, DEPTH], tl.float32)
    sum_1, sum_2, sum_3 = sum_0, sum_0, sum_0
    if LACKS > 0:
        p_0 = tl.load(lacks_ptr + row * lacks_stride, row < M, 0.0)[:, None]
        p_1, p_2, p_3 = p_0, p_0, p_0
        if LACKS > 1:
            p_1 = tl.load(lacks_ptr + row * lacks_stride + 1, row < M, 0.0)[:, None]
        if LACKS > 2:
            p_2 = tl.load(lacks_ptr + row * lacks_stride + 2, row < M, 0.0)[:, None]
        if LACKS > 3:
            p_3 = tl.load(lacks_ptr + row * lacks_stride + 3, row < M, 0.0)[:, None]
        if ONE:
            look = (tl.program_id(0) * ROWS // look_rows).to(tl.int64)
        else:
            look = (row // look_rows).to(tl.int64)[:, None]
    for start in range(0, width, DEPTH):
        i = start + tl.arange(0, DEPTH)
        inside = (row < M)[:, None] & (i < width)[None, :]
        x = tl.load(x_ptr + at + i[None, :], inside, 0.0).to(tl.float32)
        if LACKS > 0:
            there = (i < width)[None, :] if ONE else inside
            b_at = b_ptr + look * b_stride + i[None, :]
            small = tl.zeros([ROWS, DEPTH], tl.float32)
            if bias_ptr is not None:
                small += tl.load(bias_ptr + look * bias_stride + i[None, :], there, 0.0).to(tl.float32)
            small += p_0 * tl.load(b_at, there, 0.0)
            if LACKS > 1:
                small += p_1 * tl.load(b_at + width, there, 0.0)
            if LACKS > 2:
                small += p_2 * tl.load(b_at + 2 * width, there, 0.0)
            if LACKS > 3:
                small += p_3 * tl.load(b_at + 3 * width, there, 0.0)
            x = round_nearest(x + small, relu_ptr.dtype.element_ty).to(tl.float32)
        if relu_ptr is not None:
            x = tl.where(x < 0, 0.0, x)  # a nan stays
        sum_0 += x * tl.load(v_ptr + i, i < width, 0.0).to(tl.float32)[None, :]
        if RANK > 1:
            sum_1 += x * tl.load(v_ptr + width + i, i < width, 0.0).to(tl.float32)[None, :]
        if RANK > 2:
            sum_2 += x * tl.load(v_ptr + 2 * width + i, i < width, 0.0).to(tl.float32)[None, :]
        if RANK > 3:
            sum_3 += x * tl.load(v_ptr + 3 * width + i, i < width, 0.0).to(tl.float32)[None, :]
        if relu_ptr is not None:
            tl.store(relu_ptr + at + i[None, :], x.to(relu_ptr.dtype.element_ty), inside)
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
    total = small_part(
        p_ptr, b_ptr, bias_ptr, one, row, column, M, width, r, p_stride, b_stride, bias_stride, ROWS, COLUMNS, RANK
    )
    at = (one.to(tl.int64) * M + row)[:, None] * width + column[None, :]
    y = round_nearest(total, y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, (row < M)[:, None] & (column < width)[None, :])


def narrow(x_MI: torch.Tensor, v_rI: torch.Tensor) -> torch.Tensor:
    """x V as float32 [M, r]. x, v: contiguous, of one dtype."""
    (rows, width), rank = x_MI.shape, v_rI.shape[0]
    assert x_MI.is_contiguous() and v_rI.is_contiguous() and v_rI.shape[1] == width, (x_MI.shape, v_rI.shape)
    assert x_MI.dtype == v_rI.dtype, (x_MI.dtype, v_rI.dtype)
    if not use_kernel(x_MI.device) or not rows:
        return narrow_reference(x_MI, v_rI)
    p_Mr = torch.empty(rows, rank, device=x_MI.device)
    if rank <= FEW:
        _launch_few(x_MI, v_rI, p_Mr, None)
        return p_Mr
    wide = max(LEAST, 1 << (rank - 1).bit_length())
    depth = DEPTH if x_MI.element_size() == 2 else DEPTH // 2
    flags = {"ROWS": ROWS_IN, "DEPTH": max(LEAST, depth * LEAST // wide), "RANK": wide, "PRECISION": "ieee"}
    with on_device(x_MI):
        options = {"num_warps": 4, "num_stages": STAGES, "enable_fp_fusion": False}
        _narrow_kernel[(-(-rows // ROWS_IN),)](x_MI, v_rI, p_Mr, rows, width, rank, **flags, **options)
    return p_Mr


def narrow_relu(
    x_MI: torch.Tensor, v_rI: torch.Tensor, lacks: Small | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(max(x, 0), its product with V as float32 [M, r]). x, v: contiguous, of one dtype. lacks: what is added to x
    before, which is rounded then; x itself stays as it is."""
    (rows, width), rank = x_MI.shape, v_rI.shape[0]
    assert x_MI.is_contiguous() and v_rI.is_contiguous() and v_rI.shape[1] == width, (x_MI.shape, v_rI.shape)
    assert x_MI.dtype == v_rI.dtype, (x_MI.dtype, v_rI.dtype)
    if not use_kernel(x_MI.device) or not rows:
        return narrow_relu_reference(x_MI, v_rI, lacks)
    if rank > FEW or (lacks is not None and lacks[0].shape[2] > FEW):
        y_MI = torch.relu(x_MI) if lacks is None else correct(x_MI, *lacks).relu_()
        return y_MI, narrow(y_MI, v_rI)
    y_MI, p_Mr = torch.empty_like(x_MI), torch.empty(rows, rank, device=x_MI.device)
    _launch_few(x_MI, v_rI, p_Mr, y_MI, lacks)
    return y_MI, p_Mr


def _launch_few(
    x_MI: torch.Tensor,
    v_rI: torch.Tensor,
    p_Mr: torch.Tensor,
    relu_MI: torch.Tensor | None,
    lacks: Small | None = None,
) -> None:
    (rows, width), rank = x_MI.shape, v_rI.shape[0]
    small, sizes, own = (None, None, None), (rows, 0, 0, 0), 0
    high, deep, warps = FEW_ROWS, FEW_DEPTH, FEW_WARPS
    if lacks is not None:
        small, (p_LMr, b_LrO, bias_LO) = lacks, lacks
        check_small_part(*lacks)
        assert p_LMr.shape[0] * p_LMr.shape[1] == rows and b_LrO.shape[2] == width, (p_LMr.shape, b_LrO.shape)
        sizes = p_LMr.shape[1], p_LMr.stride(1), b_LrO.stride(0), 0 if bias_LO is None else bias_LO.stride(0)
        high, deep, warps, own = CORRECTED_ROWS, CORRECTED_DEPTH, CORRECTED_WARPS, p_LMr.shape[2]
    flags = {"ROWS": high, "DEPTH": deep, "RANK": rank, "LACKS": own, "ONE": CORRECTED_AT_ONCE and sizes[0] % high == 0}
    with on_device(x_MI):
        flags |= {"num_warps": warps, "enable_fp_fusion": False}
        _narrow_few_kernel[(-(-rows // high),)](x_MI, v_rI, p_Mr, relu_MI, *small, rows, width, rank, *sizes, **flags)


def widen(p_LMr: torch.Tensor, b_LrO: torch.Tensor, bias_LO: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """p B^T + b as [L, M, O] in this dtype. p: float32, may be columns of a wider one; b: float32, contiguous for each
    look."""
    (looks, rows, rank), width = p_LMr.shape, b_LrO.shape[2]
    check_small_part(p_LMr, b_LrO, bias_LO)
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
