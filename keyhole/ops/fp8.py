"""Weights in 8 bits: E4M3 codes with a power-of-two scale for every 64 elements.

    packed   uint8 [n + n / 64]:  n codes, then n / 64 exponents k, one per group of 64 consecutive elements
    w        code * 2^(k - 127),  k the smallest with  amax(group) <= 448 * 2^(k - 127)

448 is the largest E4M3 number (4 bits of exponent, 3 of fraction). A power of two as scale only changes exponents:
decoding is exact in float32, and a value that is on the grid of its group is preserved. Weights take 1.0156 bytes per
element in host memory and on the link, half of bfloat16. An element keeps 4 significant bits down to about 2^-14 of the
largest of its group; below that the grid is even, of about 2^-17 (subnormal codes).

Encoding maps x = |w| 2^(127 - k) to an axis on which the codes are the integers, with 20 bits of fraction:

    normal codes       the float32 pattern, less that of 2^-7: its next 20 bits lie below the code
    subnormal codes    the pattern of x + 2^-6, less that of 2^-6: the sum has the even grid of that range

    nearest            ties to even, bit for bit like PyTorch's conversion of the scaled value
    stochastic         the 16 bits of the element (rounding/bits.py: a function of seed, step and index) are added as
                       the top of the fraction, plus half of their last place: unbiased to 2^-16 of a step, and
                       exact values stay. A remainder below 2^-17 of a step above a code is lost.

Every group is scaled alone, so cutting a tensor between groups changes nothing. Zeros keep their sign; a group of zeros
has k = 0. NaN and inf become the NaN code, without a sign (processors disagree about the sign of a NaN), and do not
affect the scale, so the rest of the group survives. k is at most 247. Only values above 1.875 * 2^127 may round to
2^128, which float32 reads as inf. Encoding a decoded tensor preserves every value; the bytes may differ the first time,
if rounding had left a group with a maximum below what its scale allows.
"""

from typing import Any

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.noise.words import CHUNK, WIDTH, check_index, chunks, key, span, unsigned, words_of_tile
from keyhole.ops.rounding.bits import STREAM, TILE, chunk_bits_reference, vector_bits
from keyhole.ops.rounding.round import round_nearest

GROUP = 64  # elements to a scale
INF_PATTERN = 0x7F800000
NAN_CODE = 0x7F
ROOM = 0x1FFFFF  # carries values above 1.75 * 2^e, the largest code's place in its binade, into the exponent
SMALLEST_NORMAL = 2.0**-6
NORMAL_ZERO, SUBNORMAL_ZERO = 120 << 23, 121 << 23  # patterns of 2^-7 and 2^-6: the origins of the axis
EVEN_GRID = 2.0**14  # float32 numbers near it are 2^-9 apart, like the subnormal codes
EVEN_GRID_ZERO = 141 << 23  # its pattern
DECODE_GROUPS, WARPS = 16, 4  # groups per program that decodes: 8 elements per thread, 16 bytes of bfloat16

_GROUP, _WIDTH, _TILE, _STREAM = (tl.constexpr(i) for i in (GROUP, WIDTH, TILE, STREAM))
_INF, _NAN_CODE, _ROOM = tl.constexpr(INF_PATTERN), tl.constexpr(NAN_CODE), tl.constexpr(ROOM)
_NORMAL_ZERO, _SUBNORMAL_ZERO = tl.constexpr(NORMAL_ZERO), tl.constexpr(SUBNORMAL_ZERO)
_SMALLEST_NORMAL, _EVEN_GRID, _EVEN_GRID_ZERO = map(tl.constexpr, (SMALLEST_NORMAL, EVEN_GRID, EVEN_GRID_ZERO))


def packed_bytes(n: int) -> int:
    """Bytes of n elements, a multiple of 64."""
    assert n % GROUP == 0, n
    return n + n // GROUP


def packed_parts(packed: torch.Tensor, n: int, begin: int, end: int) -> list[torch.Tensor]:
    """Views of the codes and the scales of elements [begin, end), multiples of 64, of n packed ones."""
    return [packed[begin:end], packed[n + begin // GROUP : n + end // GROUP]]


def scale_exponents_reference(w_G64: torch.Tensor) -> torch.Tensor:
    """k (int32 [G]) from the largest finite magnitude of each group."""
    pattern_G64 = w_G64.view(torch.int32) & 0x7FFFFFFF
    amax_G = torch.where(pattern_G64 < INF_PATTERN, pattern_G64, 0).amax(1)
    return (((amax_G + ROOM) >> 23) - 8).clamp_(min=0)


def scales_reference(k_G: torch.Tensor) -> torch.Tensor:
    """2^(k - 127) as float32, from bytes; 2^-127 is a subnormal number."""
    k_G = k_G.to(torch.int32)
    return torch.where(k_G == 0, 1 << 22, k_G << 23).view(torch.float32)


def codes_reference(x: torch.Tensor, bits: torch.Tensor | None) -> torch.Tensor:
    """E4M3 codes (uint8) of scaled values, |x| <= 448 or not finite. bits: 16 each (int32); None for nearest."""
    pattern, magnitude = x.view(torch.int32) & 0x7FFFFFFF, x.abs()
    if bits is None:
        code = magnitude.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        small = (magnitude + SMALLEST_NORMAL).view(torch.int32) - SUBNORMAL_ZERO
        axis = torch.where(magnitude < SMALLEST_NORMAL, small, pattern - NORMAL_ZERO)
        code = ((axis + (bits << 4) + 8) >> 20).to(torch.uint8)
    signed = code | ((x.view(torch.int32) >> 24) & 0x80).to(torch.uint8)
    return torch.where(pattern < INF_PATTERN, signed, NAN_CODE)  # PyTorch's handling of inf depends on its version


def fp8_encode_reference_(
    w: torch.Tensor, packed: torch.Tensor, offset: int, seed: int, step: int, stochastic: bool
) -> None:
    n = w.numel()
    which: dict[str, Any] = {"seed": seed, "step": step, "device": w.device}
    for part in chunks(offset, n):
        w_G64 = w[part].view(-1, GROUP)
        k_G = scale_exponents_reference(w_G64)
        x = (w_G64 * ((254 - k_G) << 23).view(torch.float32).unsqueeze(1)).view(-1)
        bits = chunk_bits_reference(offset + part.start, x.numel(), **which) if stochastic else None
        packed[part] = codes_reference(x, bits)
        packed[n + part.start // GROUP : n + part.stop // GROUP] = k_G


def fp8_decode_reference(packed: torch.Tensor, out: torch.Tensor) -> None:
    n = out.numel()
    for start in range(0, n, CHUNK):
        stop = min(n, start + CHUNK)
        codes = packed[start:stop].view(torch.float8_e4m3fn).to(torch.float32)
        scales_G = scales_reference(packed[n + start // GROUP : n + stop // GROUP])
        out[start:stop] = codes.view(-1, GROUP).mul_(scales_G.unsqueeze(1)).view(-1)


@jit()
def _nearest_code(pattern, magnitude):
    """The code of |x| <= 448, ties to even."""
    small = (magnitude + _EVEN_GRID).to(tl.int32, bitcast=True) - _EVEN_GRID_ZERO
    normal = (pattern - _NORMAL_ZERO + 0x7FFFF + ((pattern >> 20) & 1)) >> 20
    return tl.where(magnitude < _SMALLEST_NORMAL, small, normal)


@jit()
def _stochastic_code(pattern, magnitude, bits):
    """The code of |x| <= 448 with 16 random bits."""
    small = (magnitude + _SMALLEST_NORMAL).to(tl.int32, bitcast=True) - _SUBNORMAL_ZERO
    axis = tl.where(magnitude < _SMALLEST_NORMAL, small, pattern - _NORMAL_ZERO)
    return (axis + (bits << 4).to(tl.int32) + 8) >> 20


@jit()
def finite_pattern(w):
    """The pattern of |w|, int32; 0 where w is not finite."""
    pattern = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(pattern < _INF, pattern, 0)


@jit()
def scale_exponents(largest):
    """k of groups, from the largest `finite_pattern` of each."""
    return tl.maximum(((largest + _ROOM) >> 23) - 8, 0)


@jit()
def coded(w, k, bits, STOCHASTIC: tl.constexpr):
    """Codes (int32) of float32 values, by the exponents of their groups."""
    pattern = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite, sign = pattern < _INF, (w.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = pattern.to(tl.float32, bitcast=True) * ((254 - k) << 23).to(tl.float32, bitcast=True)
    pattern = magnitude.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        code = _stochastic_code(pattern, magnitude, bits)
    else:
        code = _nearest_code(pattern, magnitude)
    return tl.where(finite, code | sign, _NAN_CODE)


@jit()
def decoded(code, k):
    """float32 values of codes and exponents, both int32."""
    scale = tl.where(k == 0, 1 << 22, k << 23).to(tl.float32, bitcast=True)
    magnitude = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120  # exponent bias 7 to 127
    pattern = (magnitude * scale).to(tl.int32, bitcast=True)
    pattern = tl.where((code & 0x7F) == _NAN_CODE, 0x7FC00000, pattern) | ((code & 0x80) << 24)
    return pattern.to(tl.float32, bitcast=True)


@jit(do_not_specialize=["tile_0", "lead", "n", "step", "k0", "k1"])
def _encode_kernel(w_ptr, packed_ptr, tile_0, lead, n, step, k0, k1, STOCHASTIC: tl.constexpr):
    """One program: a tile of random bits, 8 vectors of 16 groups. The tensor starts `lead` groups into tile_0."""
    pid = tl.program_id(0).to(tl.int64)
    step, k0, k1 = unsigned(step, k0, k1)
    start = pid * (_TILE // _GROUP) - lead  # in groups; negative if before the tensor
    lo, hi = tl.maximum(-start, 0).to(tl.int32), tl.minimum(n // _GROUP - start, _TILE // _GROUP).to(tl.int32)
    w_ptr, codes_ptr, scales_ptr = w_ptr + start * _GROUP, packed_ptr + start * _GROUP, packed_ptr + n + start
    words = (k0, k0, k0, k0)
    if STOCHASTIC:
        lane = tl.arange(0, _WIDTH // _GROUP)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        words = words_of_tile(tile_0 + pid, lane, _STREAM, (step, k0, k1))
    for v in tl.static_range(8):
        group = v * (_WIDTH // _GROUP) + tl.arange(0, _WIDTH // _GROUP)
        exists = (group >= lo) & (group < hi)
        at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        w = tl.load(w_ptr + at, exists[:, None], 0.0)
        k = scale_exponents(tl.max(finite_pattern(w), 1))
        code = coded(w, k[:, None], vector_bits(words, v), STOCHASTIC)
        tl.store(codes_ptr + at, code.to(tl.uint8), exists[:, None])
        tl.store(scales_ptr + group, k.to(tl.uint8), exists)


@jit(do_not_specialize=["n"])
def _decode_kernel(packed_ptr, out_ptr, n, GROUPS: tl.constexpr):
    """One program: GROUPS groups."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    exists = group < n // _GROUP
    at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    code = tl.load(packed_ptr + at, exists[:, None], 0).to(tl.int32)
    k = tl.load(packed_ptr + n + group, exists, 0).to(tl.int32)
    w = decoded(code, k[:, None])
    tl.store(out_ptr + at, round_nearest(w, out_ptr.dtype.element_ty), exists[:, None])


def _check(packed: torch.Tensor, flat: torch.Tensor) -> None:
    """Asserts that these are a packed and an unpacked form of the same number of weights."""
    assert flat.dim() == 1 and flat.is_contiguous() and packed.is_contiguous(), (flat.shape, packed.shape)
    assert packed.dtype == torch.uint8 and packed.shape == (packed_bytes(flat.numel()),), packed.shape


def fp8_decode(packed: torch.Tensor, out: torch.Tensor) -> None:
    """out <- the weights. out: flat [n], float32 (exact) | bfloat16 | float16 (one rounding, to nearest)."""
    _check(packed, out)
    if not use_kernel(out.device) or out.numel() == 0:
        return fp8_decode_reference(packed, out)
    programs, options = -(-out.numel() // (GROUP * DECODE_GROUPS)), {"num_warps": WARPS, "enable_fp_fusion": False}
    with on_device(out):
        _decode_kernel[(programs,)](packed, out, out.numel(), GROUPS=DECODE_GROUPS, **options)


def fp8_encode_(
    w: torch.Tensor, packed: torch.Tensor, *, offset: int, seed: int, step: int, rounding: str = "stochastic"
) -> None:
    """packed <- w. w: flat float32 [n] whose first element has global index `offset`, a multiple of 64."""
    _check(packed, w)
    assert w.dtype == torch.float32 and offset % GROUP == 0, (w.dtype, offset)
    check_index(offset, w.numel(), seed, (step,))
    stochastic = rounding == "stochastic"
    if not use_kernel(w.device) or w.numel() == 0:
        return fp8_encode_reference_(w, packed, offset, seed, step, stochastic)
    programs, (tile_0, lead, n) = span(offset, w.numel(), TILE)
    flags = {"STOCHASTIC": stochastic, "num_warps": WARPS, "enable_fp_fusion": False}
    with on_device(w):
        _encode_kernel[(programs,)](w, packed, tile_0, lead // GROUP, n, *key(seed, step), **flags)
