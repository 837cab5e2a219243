"""Decompressing in one stage, for projectors of blocks: W <- round(keep W + alpha (P delta) Q^T), in place.

A tile of W needs only the numbers of delta where its row blocks and column blocks cross. A program owns a strip of 128
rows and some columns, and processes it 16 rows (a lane of rounding/bits.py) at a time. It builds the two
block-diagonal matrices in registers and computes two products on tensor cores:

    [16, c_P] [c_P, c_Q] [c_Q, columns]          c: columns of the projector in which the tile's rows have entries

A product is three passes of TF32, which is float32 to about its last bit. Each operand is split into the nearest TF32
number a and the rest a' = x - a, and the smallest terms are summed first:

    (a' b + a b') + a b

This is Triton's "tf32x3" to the bit, in fewer instructions: it also keeps a nan that stems from an infinite operand out
of the first two sums. Here it stays, since the third sum is not finite then either, and such weights do not change.
Columns of zeros add nothing, so the bits do not depend on the tile as long as the r columns of a block never straddle
an instruction's 8: hence r that is not a power of two keeps the tile of 64 columns.

The kernel is bound by instructions, about 40 per weight, and by latency. Therefore

    ahead      w, p and delta of the next iterations are copied to shared memory while this one is computed (`STAGES`):
               the compiler does not move a load above a store by itself
    lanes      `UNROLL` lanes per iteration, so that most of the choice of a lane's random bits is made at compile time
    layout     the random words are computed where the products' results are; otherwise each lane's would be exchanged
               through shared memory
    groups     are constants, because a division by a variable takes 20 instructions
    depth      c_Q grows with the columns and most of it is zeros: narrow tiles take fewer instructions

Bytes per bfloat16 weight: 2 read + 2 written; from cache 4 r / g_P of P for each tile, and as much of delta.
Legend: m, n sides of W; A, D sides of delta; r entries per row; g rows of a block.
"""

from functools import lru_cache
from typing import Any

import torch

from keyhole.ops.arguments import Number, is_on_device
from keyhole.ops.backend import jit, tl
from keyhole.ops.lsp.compress import power_of_two
from keyhole.ops.lsp.projector import Projector
from keyhole.ops.noise.words import key, unsigned
from keyhole.ops.rounding.bits import LANE_ROWS, LANES, STRIP_ROWS, some_lanes, strip_words, vector_bits
from keyhole.ops.rounding.round import FLOAT32_MAX, rounded, widened
from keyhole.ops.rounding.store import Store

COLUMNS, NUM_WARPS = 32, 1  # of a tile of W, and for it (the fastest of 15 on an H200)
UNROLL, STAGES = 2, 3  # lanes per iteration (1 | 2 | 4 | 8), and iterations under way: STAGES - 1 are loaded ahead
WIDE = 64  # columns of a tile if r is not a power of two
MOST = 64 * 64  # numbers of delta that one stage holds at a time, for WIDE columns
LARGE = 16 * 64  # with more numbers of delta per lane, less is loaded ahead: shared memory and registers are few
ROOMY: dict[str, Any] = {"UNROLL": 2, "STAGES": 2, "num_warps": 4}
EXACT = "ieee" if torch.version.hip else "tf32x3"

_LANE_ROWS, _LANES, _FLOAT32_MAX = tl.constexpr(LANE_ROWS), tl.constexpr(LANES), tl.constexpr(FLOAT32_MAX)


@jit()
def _split(x):
    """The nearest TF32 number (ties away from zero), and the rest."""
    near = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return near, x - near


@jit()
def _product(a, b, PRECISION: tl.constexpr):
    """a b in float32."""
    if PRECISION == "tf32x3":
        a, a_rest = _split(a)
        b, b_rest = _split(b)
        total = tl.dot(a_rest, b, input_precision="tf32")
        total = tl.dot(a, b_rest, total, input_precision="tf32")
        total = tl.dot(a, b, total, input_precision="tf32")
    else:
        total = tl.dot(a, b, input_precision=PRECISION)
    return total


@jit(do_not_specialize=["alpha", "keep", "offset", "step", "k0", "k1"])
def _blocks_kernel(
    w_ptr, delta_ptr, p_ptr, q_ptr,
    m, n, A, D, alpha, keep, offset, step, k0, k1,
    group_p: tl.constexpr, group_q: tl.constexpr, r_p: tl.constexpr, r_q: tl.constexpr,
    DEPTH_P: tl.constexpr, DEPTH_Q: tl.constexpr, ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, ON_DEVICE: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: a strip of some columns of W. ON_DEVICE: alpha, keep and step are pointers. ALIGNED: each lane
    begins a block, or lies in one."""
    if ON_DEVICE:
        alpha, keep, step = tl.load(alpha), tl.load(keep), tl.load(step)
    strip, first = tl.program_id(1), tl.program_id(0) * COLUMNS
    column, lane_row = first + tl.arange(0, COLUMNS), tl.arange(0, _LANE_ROWS)
    c_p, c_q = tl.arange(0, DEPTH_P), tl.arange(0, DEPTH_Q)
    block_q = first // group_q
    same_q = (c_q // r_q)[:, None] + block_q == (column // group_q)[None, :]
    q = tl.load(q_ptr + column[None, :] * r_q + (c_q % r_q)[:, None], same_q & (column < n)[None, :], 0.0)
    at_q = block_q * r_q + c_q
    like = tl.dot(tl.zeros([_LANE_ROWS, DEPTH_Q], tl.float32), q, input_precision="tf32")
    words = strip_words(strip, column, n, offset, unsigned(step, k0, k1), STOCHASTIC, like)
    in_lane = lane_row[:, None] * n + column[None, :]
    in_p, in_delta = lane_row[:, None] * r_p + (c_p % r_p)[None, :], c_p[:, None] * D + at_q[None, :]
    for i in tl.range(_LANES // UNROLL, num_stages=STAGES):
        some = some_lanes(words, i, UNROLL, STOCHASTIC)
        for j in tl.static_range(UNROLL):
            start = (strip * _LANES + i * UNROLL + j) * _LANE_ROWS
            rows, block_p = lane_row < m - start, start // group_p
            if ALIGNED:
                same_p = (lane_row // group_p)[:, None] == (c_p // r_p)[None, :]
            else:
                same_p = ((start + lane_row) // group_p - block_p)[:, None] == (c_p // r_p)[None, :]
            p = tl.load(p_ptr + start * r_p + in_p, same_p & rows[:, None], 0.0)
            depth_p = tl.minimum(((start + _LANE_ROWS - 1) // group_p + 1) * r_p, A) - block_p * r_p
            inside = (c_p < depth_p)[:, None] & (at_q < D)[None, :]
            delta = tl.load(delta_ptr + (block_p * r_p).to(tl.int64) * D + in_delta, inside, 0.0).to(tl.float32)
            mask, at = rows[:, None] & (column < n)[None, :], start.to(tl.int64) * n + in_lane
            w = tl.load(w_ptr + at, mask, 0.0)
            total = _product(_product(p, delta, PRECISION), q, PRECISION)
            bits = some[0]
            if STOCHASTIC and UNROLL > 1:
                bits = vector_bits(some, j)
            w_fp32 = widened(w)
            x = tl.where(tl.abs(total) <= _FLOAT32_MAX, w_fp32 * keep + total * alpha, w_fp32)  # rounding keeps w
            tl.store(w_ptr + at, rounded(x, bits, w.dtype, STOCHASTIC)[0], mask)


def is_aligned(group: int, width: int) -> bool:
    """Whether each aligned tile of `width` rows begins a block of `group` rows, or lies in one."""
    return width % group == 0 or group % width == 0


@lru_cache
def depth(group: int, r: int, width: int) -> int:
    """Columns of a projector of blocks in which an aligned tile of `width` rows can have entries, for tl.dot."""
    return power_of_two(r * (max(1, width // group) if is_aligned(group, width) else (width - 2) // group + 2))


def is_one_stage(p: Projector, q: Projector) -> bool:
    """Whether the kernel supports these projectors."""
    return p.group > 0 and q.group > 0 and depth(p.group, p.r, LANE_ROWS) * depth(q.group, q.r, WIDE) <= MOST


def blocks_triton_(
    w_mn: torch.Tensor, delta_Ad: torch.Tensor, p: Projector, q: Projector, alpha: Number, keep: Number, how: Store
) -> None:
    """Both products and the update of W by one kernel."""
    (m, n), columns = w_mn.shape, COLUMNS if q.r & (q.r - 1) == 0 else WIDE
    numbers = (m, n, p.d, q.d, alpha, keep, how.offset, *key(how.seed, how.step))
    flags: dict[str, Any] = {
        "group_p": p.group, "group_q": q.group, "r_p": p.r, "r_q": q.r,
        "DEPTH_P": depth(p.group, p.r, LANE_ROWS), "DEPTH_Q": depth(q.group, q.r, columns),
        "ALIGNED": is_aligned(p.group, LANE_ROWS), "STOCHASTIC": how.is_stochastic(w_mn.dtype),
        "ON_DEVICE": is_on_device(alpha, keep, how.step),
    }  # fmt: skip
    few = columns == COLUMNS and flags["DEPTH_P"] * flags["DEPTH_Q"] <= LARGE
    options = {"UNROLL": UNROLL, "STAGES": STAGES, "num_warps": NUM_WARPS} if few else ROOMY
    options |= {"PRECISION": EXACT, "COLUMNS": columns, "enable_fp_fusion": False}
    grid = (-(-n // columns), -(-m // STRIP_ROWS))
    _blocks_kernel[grid](w_mn, delta_Ad, p.values_Rr, q.values_Rr, *numbers, **flags, **options)
