"""Norms of the rows of several looks at once, each look with its own weight and bias.

    layer norm    y = (x - mean(x)) rsqrt(var(x) + eps) w_l + b_l          l = 1 .. L
    RMS norm      y =       x       rsqrt(mean(x^2) + eps) w_l             or (1 + w_l)

x_1 .. x_L are the rows of L looks, one below the other; w_l and b_l are the vectors at look l, which lie as far apart
as the arrays that they are part of. Everything is computed in float32. y is rounded once, except for `early`: Llama's
RMS norm rounds before the product with w, and once more after it.

One program has a whole row (or several short ones) in registers: x is read once and y written once, 4 bytes per number
in 16 bit. For 2048 rows of 5120 numbers 42 MB. (Look by look: L launches, and a copy that puts the results together,
which reads and writes all of y once more.)

The reference computes what PyTorch's layer norm and Hugging Face's RMS norms do on the same device, with their bits.
The kernel differs from it by the order of two sums per row; that order is the same in every launch.
Legend: L looks, M rows of all looks together, D numbers of a row.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.rounding.round import round_nearest

WIDEST = 32768  # numbers of a row that one program can hold
NUMBERS = 1024  # of a program, if rows are short
PER_WARP = 2048


@dataclass(frozen=True)
class Norm:
    """What a norm computes. centred: layer norm, else RMS norm; plus_one: times 1 + w; early: rounded before w."""

    centred: bool
    plus_one: bool = False
    early: bool = False


def norm_reference(
    x_MD: torch.Tensor, w_LD: torch.Tensor, b_LD: torch.Tensor | None, eps: float, kind: Norm
) -> torch.Tensor:
    """The norm of all rows, look by look or as a whole."""
    looks, width = w_LD.shape
    if kind.centred:
        rows = x_MD.chunk(looks) if len(x_MD) else [x_MD]
        vectors = zip(w_LD, [None] * looks if b_LD is None else b_LD, strict=True)
        return torch.cat([F.layer_norm(x, (width,), w, b, eps) for x, (w, b) in zip(rows, vectors, strict=False)])
    x_LMD = x_MD.reshape(looks, -1, width).float()
    x_LMD = x_LMD * torch.rsqrt(x_LMD.pow(2).mean(-1, keepdim=True) + eps)
    w_LMD = w_LD[:, None].float()
    w_LMD = 1.0 + w_LMD if kind.plus_one else w_LMD
    x_LMD = x_LMD.to(x_MD.dtype).float() if kind.early else x_LMD
    y_LMD = w_LMD * x_LMD
    y_LMD = y_LMD if b_LD is None else y_LMD + b_LD[:, None].float()
    return y_LMD.to(x_MD.dtype).view(-1, width)


@jit()
def _norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, M, rows, width, x_stride, w_stride, b_stride, eps,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
    CENTRED: tl.constexpr, PLUS_ONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: whole rows. rows: of each look."""
    row, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    inside = (row < M)[:, None] & (i < width)[None, :]
    one = (row // rows).to(tl.int64)[:, None]
    row = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row * x_stride + i[None, :], inside, 0.0).to(tl.float32)
    w = tl.load(w_ptr + one * w_stride + i[None, :], inside, 0.0).to(tl.float32)
    if PLUS_ONE:
        w = 1.0 + w
    if CENTRED:
        x = tl.where(inside, x - (tl.sum(x, axis=1) / width)[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    if EARLY:
        y = round_nearest(y, y_ptr.dtype.element_ty).to(tl.float32)
    y = y * w
    if b_ptr is not None:
        y += tl.load(b_ptr + one * b_stride + i[None, :], inside, 0.0).to(tl.float32)
    tl.store(y_ptr + row * width + i[None, :], round_nearest(y, y_ptr.dtype.element_ty), inside)


def norm(x_MD: torch.Tensor, w_LD: torch.Tensor, b_LD: torch.Tensor | None, eps: float, kind: Norm) -> torch.Tensor:
    """[M, D]: the norm of all rows, M / L of each look in order. All of one dtype; rows and vectors are contiguous, and
    may lie apart."""
    (rows, width), looks = x_MD.shape, w_LD.shape[0]
    assert w_LD.shape[1] == width and rows % looks == 0, (x_MD.shape, w_LD.shape)
    assert x_MD.dtype == w_LD.dtype and x_MD.stride(1) == 1, (x_MD.dtype, w_LD.dtype, x_MD.stride())
    assert b_LD is None or (b_LD.shape == w_LD.shape and b_LD.dtype == w_LD.dtype), b_LD
    if not use_kernel(x_MD.device) or not rows or width > WIDEST:
        return norm_reference(x_MD, w_LD, b_LD, eps, kind)
    assert w_LD.stride(1) == 1 and (b_LD is None or b_LD.stride(1) == 1), w_LD.stride()
    y_MD = torch.empty(rows, width, dtype=x_MD.dtype, device=x_MD.device)
    wide = 1 << (width - 1).bit_length()
    several = max(1, NUMBERS // wide)
    strides = x_MD.stride(0), w_LD.stride(0), 0 if b_LD is None else b_LD.stride(0)
    flags = {"ROWS": several, "WIDE": wide, "num_warps": min(16, max(1, several * wide // PER_WARP))}
    flags |= {"CENTRED": kind.centred, "PLUS_ONE": kind.plus_one, "EARLY": kind.early, "enable_fp_fusion": False}
    with on_device(x_MD):
        sizes = rows, rows // looks, width
        _norm_kernel[(-(-rows // several),)](x_MD, w_LD, b_LD, y_MD, *sizes, *strides, eps, **flags)
    return y_MD
