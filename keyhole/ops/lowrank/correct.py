"""The small part of a low-rank product, added by the kernel that reads the product next.

    y_l = x_l W^T + p_l B_l^T + b_l          p_l = x_l V,  l = 1 .. L looks, one below the other (product.py)

`widen` writes p B_l^T + b_l as y, and the product reads it again to add to it: 4 M O bytes in 16 bit that bear no
information, since the output is read once more anyway, by the addition to the residual stream, or by a ReLU (relu.py).
So the product is made without the small part, and

    correct    h = round(residual + round(y + p B_l^T + b_l))     reads y and the residual, writes h, as an addition
               y = round(y + p B_l^T + b_l)                       in place, where something else reads y

                               written and read, M O numbers each         2048 x 5120 in 16 bit
    widen, product, add        y; y, y; y, residual, h            6       126 MB
    product, correct           y; y, residual, h                  4        84 MB

B_l and b_l (float32) are read once per ROWS rows, from the L2 cache. Everything is computed in float32. The sum is
rounded to y's dtype before the residual is added, as by a product that is followed by an addition: so h has the same
bits whether y was corrected on the way, or in place before (because a hook has looked at it).

A sum of r terms may differ from the reference's by rounding; its order is the same in every launch and tile.
Legend: L looks, M rows of all looks together, O outputs, r rank.
"""

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.rounding.round import round_nearest

Small = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""(p [L, M, r], B [L, r, O], b [L, O]): what a product lacks, p B_l^T + b_l."""

UNROLLED = 4  # ranks up to this have a loop without a counter, so that all loads are issued at once
ROWS, COLUMNS, WARPS = 8, 256, 2  # of a tile of y; above a rank of 2, half the rows and twice the columns


def correct_reference(
    y_MO: torch.Tensor,
    p_LMr: torch.Tensor,
    b_LrO: torch.Tensor,
    bias_LO: torch.Tensor | None,
    residual_MO: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + (y + p B^T + b)."""
    with torch.autocast(y_MO.device.type, enabled=False):
        small_LMO = torch.bmm(p_LMr, b_LrO)
    small_LMO = small_LMO if bias_LO is None else small_LMO + bias_LO[:, None, :].float()
    y_MO = (y_MO.float() + small_LMO.view(y_MO.shape)).to(y_MO.dtype)
    return y_MO if residual_MO is None else residual_MO + y_MO


@jit()
def small_part(
    p_ptr, b_ptr, bias_ptr, one, row, column, M, width, r, p_stride, b_stride, bias_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """A tile of p B^T + b, for the rows of look `one`. M: rows of each look; RANK: r if it is small, or 0."""
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
    return total


@jit()
def _correct_kernel(
    y_ptr, p_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, M, width, r, p_stride, b_stride, bias_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the rows of one look. What comes from far is loaded first."""
    one = tl.program_id(2)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = (one.to(tl.int64) * M + row)[:, None] * width + column[None, :]
    inside = (row < M)[:, None] & (column < width)[None, :]
    y = tl.load(y_ptr + at, inside, 0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)
    y += small_part(
        p_ptr, b_ptr, bias_ptr, one, row, column, M, width, r, p_stride, b_stride, bias_stride, ROWS, COLUMNS, RANK
    )
    y = round_nearest(y, out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        y = round_nearest(residual + y.to(tl.float32), out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, y, inside)


def check_small_part(p_LMr: torch.Tensor, b_LrO: torch.Tensor, bias_LO: torch.Tensor | None) -> None:
    """p: float32, may be columns of a wider one; b: float32, contiguous for each look."""
    (looks, rows, rank), width = p_LMr.shape, b_LrO.shape[2]
    assert b_LrO.shape[:2] == (looks, rank) and p_LMr.stride(2) == 1, (p_LMr.shape, b_LrO.shape, p_LMr.stride())
    assert looks == 1 or not rows or p_LMr.stride(0) == rows * p_LMr.stride(1), (p_LMr.shape, p_LMr.stride())
    assert b_LrO[0].is_contiguous() and (bias_LO is None or bias_LO.shape == (looks, width)), b_LrO.stride()
    assert p_LMr.dtype == b_LrO.dtype == torch.float32, (p_LMr.dtype, b_LrO.dtype)


def correct(
    y_MO: torch.Tensor,
    p_LMr: torch.Tensor,
    b_LrO: torch.Tensor,
    bias_LO: torch.Tensor | None,
    residual_MO: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """round(residual + round(y + p B^T + b)) as a new tensor, or in `out`, which may be y. y, residual and out are
    contiguous and of one dtype, with the rows of all looks; p, b and the bias are as for `widen`."""
    (looks, rows, rank), width = p_LMr.shape, b_LrO.shape[2]
    check_small_part(p_LMr, b_LrO, bias_LO)
    for one in (y_MO, residual_MO, out):
        assert one is None or (one.shape == (looks * rows, width) and one.is_contiguous()), (one.shape, one.stride())
        assert one is None or (one.dtype == y_MO.dtype and one.device == y_MO.device), (one.dtype, one.device)
    if not use_kernel(y_MO.device) or not rows:
        made = correct_reference(y_MO, p_LMr, b_LrO, bias_LO, residual_MO)
        return made if out is None else out.copy_(made)
    out = torch.empty_like(y_MO) if out is None else out
    strides = p_LMr.stride(1), b_LrO.stride(0), 0 if bias_LO is None else bias_LO.stride(0)
    high, wide = (ROWS, COLUMNS) if rank <= 2 else (ROWS // 2, 2 * COLUMNS)
    grid = (-(-rows // high), -(-width // wide), looks)
    with on_device(y_MO):
        tile = {"ROWS": high, "COLUMNS": wide, "num_warps": WARPS, "enable_fp_fusion": False}
        tile |= {"RANK": rank if rank <= UNROLLED else 0}
        sizes = rows, width, rank
        _correct_kernel[grid](y_MO, p_LMr, b_LrO, bias_LO, residual_MO, out, *sizes, *strides, **tile)
    return out
