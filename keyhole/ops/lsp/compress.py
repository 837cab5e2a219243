"""Compressing: X P for a sparse projector P.

    out[t, j] = sum over the rows i that have an entry in column j of  x[t, i] P[i, j]            in float32

It is applied to both sides of a weight gradient before their product, so S = (dY P)^T (X Q) is a product of d columns
by d columns; the gradient is never computed, and only X Q has to be kept of X.

    blocks       a batch of products [tokens, g] [g, r]: x is read once. Neighbouring blocks form one product with a
                 block-diagonal matrix, built in registers, because blocks of a few rows would make small reads. For
                 16-bit x on tensor cores, which round the projector's entries to 11 bits (TF32) and take x exactly.
    free         one dense product with the zeros: 2 T R d operations, d / n of those of the gradient itself

Bytes of blocks, for T tokens of 16 bits: 2 T R read, 2 T d written. The kernel sums in a fixed order. Reference and
kernel differ by rounding.
Legend: T tokens, R rows, d columns, r entries per row.
"""

from math import gcd

import torch

from keyhole.ops.arguments import DTYPES
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.lsp.projector import Projector
from keyhole.ops.rounding.round import round_nearest

TOKENS = 64  # per program
DEPTH, WIDTH = 64, 32  # rows per step of the product, and columns of its result


def compress_reference(x_TR: torch.Tensor, p: Projector, out_Td: torch.Tensor) -> None:
    """All blocks in one product, or the dense product."""
    x_TR = x_TR.to(torch.float32)
    if not p.group:
        out_Td.copy_(x_TR @ p.dense_Rd())
        return
    blocks, lost = p.d // p.r, p.d // p.r * p.group - p.rows
    x_TBg = torch.nn.functional.pad(x_TR, (0, lost)).view(-1, blocks, p.group)
    values_Bgr = torch.nn.functional.pad(p.values_Rr, (0, 0, 0, lost)).view(blocks, p.group, p.r)
    out_Td.copy_(torch.einsum("tbg,bgr->tbr", x_TBg, values_Bgr).reshape(-1, p.d))


@jit()
def _compress_blocks_kernel(
    x_ptr, values_ptr, out_ptr,
    T, R, D, stride, group, r: tl.constexpr, PER: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens through PER neighbouring blocks, as one product with their block-diagonal matrix.
    ALIGNED: a power of two that divides the first row and the end of their rows."""
    first, k = tl.program_id(0) * PER, tl.arange(0, WIDTH)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros([TOKENS, WIDTH], tl.float32)
    begin, stop = tl.multiple_of(first * group, ALIGNED), tl.multiple_of(tl.minimum((first + PER) * group, R), ALIGNED)
    inside = (k < PER * r) & (first * r + k < D)
    for start in range(begin, stop, DEPTH):
        row = tl.multiple_of(start, ALIGNED) + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + token[:, None] * stride + row[None, :], (token < T)[:, None] & (row < stop)[None, :], 0.0)
        same = (row // group - first)[:, None] == (k // r)[None, :]
        value = tl.load(
            values_ptr + row[:, None] * r + (k % r)[None, :], same & (row < stop)[:, None] & inside[None, :], 0.0
        )
        total = tl.dot(x.to(tl.float32), value, total, input_precision=PRECISION)
    at = token[:, None] * D + first * r + k[None, :]
    tl.store(out_ptr + at, round_nearest(total, out_ptr.dtype.element_ty), (token < T)[:, None] & inside[None, :])


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n and 16: a valid tile side for tl.dot."""
    return max(16, 1 << (n - 1).bit_length())


def compress_triton(x_TR: torch.Tensor, p: Projector, out_Td: torch.Tensor) -> None:
    """Blocks by kernel."""
    (T, R), per = x_TR.shape, max(1, WIDTH // p.r)
    how = {
        "PER": per,
        "ALIGNED": gcd(per * p.group, R, 16),
        "PRECISION": "ieee" if x_TR.dtype == torch.float32 else "tf32",
        "TOKENS": TOKENS,
        "DEPTH": min(DEPTH, power_of_two(per * p.group)),
        "WIDTH": power_of_two(per * p.r),
    }
    grid = (-(-p.d // (per * p.r)), -(-T // TOKENS))
    sizes = (T, R, p.d, x_TR.stride(0), p.group)
    with on_device(x_TR):
        _compress_blocks_kernel[grid](x_TR, p.values_Rr, out_Td, *sizes, r=p.r, **how, num_warps=4)


def compress(x_TR: torch.Tensor, projector: Projector, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x P as [T, d], in out_dtype (None: x's). x: float32 | bfloat16 | float16, its rows contiguous."""
    assert x_TR.dim() == 2 and x_TR.shape[1] == projector.rows and x_TR.dtype in DTYPES, (x_TR.shape, x_TR.dtype)
    assert x_TR.stride(1) == 1 or x_TR.shape[1] == 1, x_TR.stride()
    out_Td = torch.empty(x_TR.shape[0], projector.d, dtype=out_dtype or x_TR.dtype, device=x_TR.device)
    if x_TR.shape[0]:
        run = compress_triton if use_kernel(x_TR.device) and projector.group else compress_reference
        run(x_TR, projector, out_Td)
    return out_Td
