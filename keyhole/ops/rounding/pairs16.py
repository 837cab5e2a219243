"""16-bit weights, two per register: widened, rounded, packed and compared in few instructions.

The passes over the weights are bound by the number of instructions. By default the compiler moves each 16-bit value
into a register of its own and back, and counts changes with a compare, a select and an add for each. A pair takes

    widened          bfloat16 to float32     2 instructions: shift the low half up; mask the low half off
    rounded          float32, low bits 0     1: pick both upper halves
    count_changed    how many differ         2: compare both at once to (1.0 or 0.0), add both at once

Each function has a plain form with the same result, for float32, for Triton's interpreter and for other GPUs. Counts
are kept exactly in the 16-bit type itself: a place in the block is counted 8 times, and bfloat16 counts to 256.
"""

from functools import cache

import torch

from keyhole.ops.backend import INTERPRETED, jit, tl
from keyhole.ops.rounding.round import NAN_WITH_ROOM, round_nearest, round_stochastic

PAIRS = not INTERPRETED and torch.version.hip is None
_PAIRS, _NAN = tl.constexpr(PAIRS), tl.constexpr(NAN_WITH_ROOM)
_APART = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_TOGETHER = tl.constexpr("prmt.b32 $0, $1, $2, 0x7632;")
_COUNT_BF16 = tl.constexpr("{.reg .b32 t; set.neu.bf16x2.bf16x2 t, $1, $2; add.rn.bf16x2 $0, $3, t;}")
_COUNT_FP16 = tl.constexpr("{.reg .b32 t; set.neu.f16x2.f16x2 t, $1, $2; add.rn.f16x2 $0, $3, t;}")


@cache
def counts_pairs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether changes are counted two at a time: bfloat16 pairs can be compared from compute capability 9.0 on."""
    if not PAIRS or device.type != "cuda":
        return False
    return dtype == torch.float16 or (dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] >= 9)


@jit()
def widened(w):
    """A block of weights in float32."""
    if _PAIRS and w.dtype == tl.bfloat16:
        word = tl.inline_asm_elementwise(_APART, "=&r,=&r,r", [w], tl.uint32, is_pure=True, pack=2)
        wide = word.to(tl.float32, bitcast=True)
    else:
        wide = w.to(tl.float32)
    return wide


@jit()
def rounded(x, bits, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """float32 rounded to DTYPE: as DTYPE, and the same value in float32."""
    if _PAIRS and STOCHASTIC and DTYPE == tl.bfloat16:
        pattern = tl.minimum(x.to(tl.int32, bitcast=True), _NAN).to(tl.uint32, bitcast=True) + bits
        half = tl.inline_asm_elementwise(_TOGETHER, "=r,r,r", [pattern], tl.uint16, is_pure=True, pack=2)
        new = half.to(tl.bfloat16, bitcast=True)
        wide = (pattern & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        if STOCHASTIC:
            new = round_stochastic(x, bits, DTYPE)
        else:
            new = round_nearest(x, DTYPE)
        wide = new.to(tl.float32)
    return new, wide


@jit()
def no_changes(lanes, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """A block of zeros to count in."""
    if PAIRS:
        zeros = (lanes * 0).to(DTYPE)
    else:
        zeros = lanes * 0
    return zeros


@jit()
def count_changed(count, new, w, mask, PAIRS: tl.constexpr, MASKED: tl.constexpr):
    """count + (new != w), element by element."""
    if PAIRS:
        if MASKED:
            new = tl.where(mask, new, w)  # outside of the tensor both are 0: masked.load
        ASM: tl.constexpr = _COUNT_BF16 if w.dtype == tl.bfloat16 else _COUNT_FP16
        count = tl.inline_asm_elementwise(ASM, "=r,r,r,r", [new, w, count], w.dtype, is_pure=True, pack=2)
    else:
        differ = new.to(tl.float32) != w.to(tl.float32)
        if MASKED:
            differ = differ & mask
        count += differ.to(tl.int32)
    return count
