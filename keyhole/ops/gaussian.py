"""Standard normals from pairs of random words, the same bits on every processor.

Box-Muller: with u1 = ((a >> 8) + 1) 2^-24 in (0, 1] and u2 = (b >> 8) 2^-24 in [0, 1),

    r = sqrt(-2 ln u1)      z_even = r cos(2 pi u2)      z_odd = r sin(2 pi u2)

Math libraries disagree in the last bit about ln, sin and cos, and even one library does between its vector
code and its tails. So we evaluate our own polynomials, in operations that IEEE 754 defines to the bit: +, -,
*, sqrt, and no fused multiply-add anywhere. A run made on one GPU can then be replayed, bit for bit, on a CPU
or on another GPU.

    ln:  u1 = 2^e x with x in [sqrt(1/2), sqrt(2)), f = x - 1 (exact), -2 ln u1 = (-2 ln 2) e + f P(f).
         P has degree 7 and a small relative error, so that r is right near u1 = 1 too, where it vanishes.
    sin: the top bit of b is half a turn, a sign; the next 23 are v in [0, 1), an angle of pi v. With
         c = 1/2 - v and d = 1/2 - |c|, both exact and in [-1/2, 1/2], cos(pi v) = S(c) and sin(pi v) = S(d),
         where S(c) = sin(pi c) is an odd polynomial of degree 9.
    r:   at least 2^-32, so that the square root needs no special cases.

Error against exact Box-Muller: r within 4.7e-7 (all 2^24 values of u1), S within 1.6e-7 (all its arguments),
z within 1.1e-6 (the largest of 2e8 draws) and 5e-8 on average. |z| <= sqrt(48 ln 2) = 5.77, as the 24 bits of
u1 imply. Coefficients: Remez exchange, rounded to float32; for S also a search of the neighbouring floats.
"""

import numpy as np
import torch

from keyhole.ops.backend import INTERPRETED, jit, tl

# Every number here is exactly a float32. LOG is P, constant term first; SINE has those of c, c^3, .., c^9.
LOG = (-1.9999998807907104, 1.000006914138794, -0.6667121648788452, 0.49943119287490845,
       -0.3976846933364868, 0.344248503446579, -0.32676297426223755, 0.20757447183132172)
SINE = (3.1415927410125732, -5.167707443237305, 2.550030469894409, -0.5980414152145386, 0.0772138461470604)
MINUS_2_LN_2 = -1.3862943649291992 * 2.0**-23  # the exponent arrives multiplied by 2^23
SMALLEST = 2.0**-64
SCALE_BITS = 24 << 23  # u1 comes multiplied by 2^24, as an integer
SQRT_HALF_SCALED_BITS = 0x3F3504F3 + SCALE_BITS
ONE_BITS = 0x3F800000

# As 0-dim tensors: PyTorch's call costs a third of what it does with a Python float.
_LOG, _SINE = torch.tensor(LOG).unbind(), torch.tensor(SINE).unbind()
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7 = (tl.constexpr(value) for value in LOG)
_S0, _S1, _S2, _S3, _S4 = (tl.constexpr(value) for value in SINE)
_MINUS_2_LN_2, _SMALLEST = tl.constexpr(MINUS_2_LN_2), tl.constexpr(SMALLEST)
_SCALE, _SQRT_HALF_SCALED = tl.constexpr(SCALE_BITS), tl.constexpr(SQRT_HALF_SCALED_BITS)
_ONE = tl.constexpr(ONE_BITS)
_SQRT_BY_FMA = tl.constexpr(not INTERPRETED and torch.version.hip is None)


def _horner(x: torch.Tensor, coefficients: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The polynomial at x, coefficients from the constant term up."""
    value = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[0])


def radius_reference(word: torch.Tensor) -> torch.Tensor:
    """r = sqrt(-2 ln u1), float32, from words held in int32."""
    pattern = (word >> 8).bitwise_and_(0xFFFFFF).add_(1).to(torch.float32).view(torch.int32)
    exponent = (pattern - SQRT_HALF_SCALED_BITS).bitwise_and_(-0x800000)
    f = pattern.sub_(exponent).sub_(SCALE_BITS).view(torch.float32).sub_(1.0)
    return _root_(exponent.to(torch.float32).mul_(MINUS_2_LN_2).add_(_horner(f, _LOG).mul_(f)).clamp_(min=SMALLEST))


def _root_(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root, in place. (PyTorch's on x86 may be MKL's, which is off by an ulp at times.)"""
    if x.device.type == "cpu":
        np.sqrt(x.numpy(), out=x.numpy())
        return x
    return x.sqrt_()


def sine_reference(c: torch.Tensor) -> torch.Tensor:
    """sin(pi c) for |c| <= 1/2."""
    return _horner(c * c, _SINE).mul_(c)


def gaussian_pair_reference(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(z_even, z_odd), float32, from two words per pair, held in int32."""
    r = radius_reference(a)
    r.view(torch.int32).bitwise_xor_(b & -0x80000000)
    v_plus_1 = (b >> 8).bitwise_and_(0x7FFFFF).bitwise_or_(ONE_BITS).view(torch.float32)
    c = torch.rsub(v_plus_1, 1.5)
    d = torch.rsub(c.abs(), 0.5)
    return sine_reference(c).mul_(r), sine_reference(d).mul_(r)


@jit()
def radius(word):
    """The same in a kernel, from a uint32 block."""
    pattern = ((word >> 8) + 1).to(tl.int32).to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (pattern - _SQRT_HALF_SCALED) & -0x800000
    f = (pattern - exponent - _SCALE).to(tl.float32, bitcast=True) - 1.0
    p = ((((((f * _L7 + _L6) * f + _L5) * f + _L4) * f + _L3) * f + _L2) * f + _L1) * f + _L0
    return _square_root(tl.maximum(exponent.to(tl.float32) * _MINUS_2_LN_2 + p * f, _SMALLEST))


@jit()
def _square_root(x):
    """The correctly rounded root of a number from 2^-64 to 34.

    NVIDIA's sqrt.rn is the operations below behind a branch for extreme arguments, which we have none of.
    """
    if _SQRT_BY_FMA:
        y = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True,
                                      pack=1)
        root = x * y
        root = tl.fma(tl.fma(-root, root, x), 0.5 * y, root)
    else:
        root = tl.sqrt_rn(x)
    return root


@jit()
def sine(c):
    """sin(pi c) for |c| <= 1/2."""
    square = c * c
    return ((((square * _S4 + _S3) * square + _S2) * square + _S1) * square + _S0) * c


@jit()
def gaussian_pair(a, b):
    """(z_even, z_odd) from two uint32 blocks."""
    r = (radius(a).to(tl.uint32, bitcast=True) ^ (b & 0x80000000)).to(tl.float32, bitcast=True)
    c = 1.5 - (((b >> 8) & 0x7FFFFF) | _ONE).to(tl.float32, bitcast=True)
    d = 0.5 - tl.abs(c)
    return sine(c) * r, sine(d) * r
