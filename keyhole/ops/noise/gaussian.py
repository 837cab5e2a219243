"""Standard normals from pairs of random words, the same bits on every processor.

Box-Muller: with u1 = ((a >> 9) + 1/2) 2^-23, s = +1 or -1 by the top bit of b, and v = (b % 2^23) 2^-23,

    r = sqrt(-2 ln u1)      z_even = s r cos(pi v)      z_odd = s r sin(pi v)

Math libraries disagree in the last bit of ln, sin and cos, and even one library may disagree between its vector code
and its tails. So we evaluate our own polynomials, in operations that IEEE 754 defines to the bit: +, -, *, sqrt, and no
fused multiply-add. A run on one GPU can then be replayed, bit for bit, on a CPU or on another GPU. The passes over the
weights are bound by arithmetic, so the polynomials are short, and random bits become floats by setting the exponent,
not by conversion:

    ln:  u1 = 2^e (2 - h) with h in (0, 1]. The float's bits, as an integer, are linear in u1 between powers
         of two: (bits(u1) - bits(1)) 2^-23 = e + 1 - h, so -2 ln u1 = (-2 ln 2)(e + 1 - h) + h H(h), with H
         of degree 5. Both terms vanish with h where e = -1, so r is right near u1 = 1 too; u1 is never 1,
         and the square root needs no special cases.
    cos: with t = v/4 - 1/8 (exact) and q = t^2, cos(pi v) = -sin(4 pi t) = K t M(q), M a cubic.
    sin: sin(pi v) = cos(4 pi t) = K (Y(q)^2 - D), Y a quadratic: 8th degree in t for 5 operations.
    K:   the scale of t (a power of two) and K are chosen so that M and Y may both begin with 1; K = 9166.52 itself
         is part of the radius, as a factor K^2 in H and in the slope.

Error against exact Box-Muller: r within 2.2e-6 (all values of u1), cos within 1.2e-6 and sin within 2.8e-6
(all values of v), z within 1.4e-5 (the largest of 1e8 draws) and 1.5e-6 on average (even 1.0e-6, odd 2.1e-6).
|z| <= sqrt(48 ln 2) = 5.77, as the bits of u1 imply. Coefficients: iteratively reweighted least squares
towards the smallest largest error (that of H as it shows in r), rounded to float32.
"""

import numpy as np
import torch

from keyhole.ops.backend import INTERPRETED, jit, tl

# Every number here is exactly a float32. LOG is K^2 H, SINE is M and COSINE (Y, D), constant term first.
LOG = (-32462742.0, 21119732.0, 6163109.5, 5212352.5, -2611207.0, 2578352.5)
SLOPE = -13.885916709899902  # K^2 (-2 ln 2) 2^-23
SINE = (-0.001370899612084031, 0.03607889637351036, -0.2842140197753906)
COSINE = (0.014918345957994461, -0.2886732518672943, 0.00011346467363182455)
BELOW_ONE = 1 - 2.0**-24
MANTISSA = 0x7FFFFF
ONE_BITS, QUARTER_BITS = 0x3F800000, 0x3E800000

# As 0-dim tensors: a PyTorch call then costs a third of one with a Python float.
_LOG = torch.tensor(LOG).unbind()
_SINE, _COSINE = torch.tensor(SINE).unbind(), torch.tensor(COSINE).unbind()
_H0, _H1, _H2, _H3, _H4, _H5 = (tl.constexpr(value) for value in LOG)
_M0, _M1, _M2 = (tl.constexpr(value) for value in SINE)
_Y0, _Y1, _D = (tl.constexpr(value) for value in COSINE)
_SLOPE, _BELOW_ONE, _MANTISSA = tl.constexpr(SLOPE), tl.constexpr(BELOW_ONE), tl.constexpr(MANTISSA)
_ONE, _QUARTER = tl.constexpr(ONE_BITS), tl.constexpr(QUARTER_BITS)
_SQRT_BY_FMA = tl.constexpr(not INTERPRETED and torch.version.hip is None)


def _horner_(value: torch.Tensor, x: torch.Tensor, coefficients: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """(.. (value + c_n) x + ..) x + c_0, in place; coefficients from the constant term up."""
    for coefficient in coefficients[:0:-1]:
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[0])


def radius_reference(word: torch.Tensor) -> torch.Tensor:
    """K r = K sqrt(-2 ln u1), float32, from words held in int32."""
    x = (word >> 9).bitwise_and_(MANTISSA).bitwise_or_(ONE_BITS).view(torch.float32)
    pattern = x.sub_(BELOW_ONE).view(torch.int32)
    h = torch.rsub((pattern & MANTISSA).bitwise_or_(ONE_BITS).view(torch.float32), 2.0)
    linear = pattern.sub_(ONE_BITS).to(torch.float32).mul_(SLOPE)
    return _root_(linear.add_(_horner_(h * _LOG[5], h, _LOG[:5]).mul_(h)))


def _root_(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded root, in place. (PyTorch's on x86 may be MKL's, off by an ulp at times.)"""
    if x.device.type == "cpu":
        np.sqrt(x.numpy(), out=x.numpy())
        return x
    return x.sqrt_()


def turn_reference(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos(pi v) / K and sin(pi v) / K."""
    t = (word & MANTISSA).bitwise_or_(QUARTER_BITS).view(torch.float32).sub_(0.375)
    q = t * t
    y = _horner_(q.clone(), q, _COSINE[:2])
    return _horner_(q.clone(), q, _SINE).mul_(t), y.mul_(y).sub_(_COSINE[2])


def gaussian_pair_reference(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(z_even, z_odd), float32, from two words per pair, held in int32."""
    r = radius_reference(a)
    r.view(torch.int32).bitwise_xor_(b & -0x80000000)
    even, odd = turn_reference(b)
    return even.mul_(r), odd.mul_(r)


@jit()
def radius(word):
    """The same in a kernel, from a uint32 block."""
    u1 = ((word >> 9) + _ONE).to(tl.float32, bitcast=True) - _BELOW_ONE
    pattern = u1.to(tl.uint32, bitcast=True)
    h = 2.0 - ((pattern & _mantissa()) | _ONE).to(tl.float32, bitcast=True)
    curve = (((((h * _H5 + _H4) * h + _H3) * h + _H2) * h + _H1) * h + _H0) * h
    return _square_root((pattern - _ONE).to(tl.int32, bitcast=True).to(tl.float32) * _SLOPE + curve)


@jit()
def _mantissa():
    """0x7FFFFF, times a 1 that the compiler cannot know (our grids have no third axis).

    So it stays in a register, and masking a word and setting its exponent takes one instruction instead of two.
    """
    return tl.num_programs(2).to(tl.uint32) * _MANTISSA


@jit()
def _square_root(x):
    """The correctly rounded root of a number from 10 to 2^32.

    NVIDIA's sqrt.rn does the operations below, after a branch for extreme arguments, which do not occur here.
    """
    if _SQRT_BY_FMA:
        y = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        root = x * y
        root = tl.fma(tl.fma(-root, root, x), 0.5 * y, root)
    else:
        root = tl.sqrt_rn(x)
    return root


@jit()
def turn(word):
    """cos(pi v) / K and sin(pi v) / K."""
    t = ((word & _mantissa()) | _QUARTER).to(tl.float32, bitcast=True) - 0.375
    q = t * t
    y = (q + _Y1) * q + _Y0
    return (((q + _M2) * q + _M1) * q + _M0) * t, y * y - _D


@jit()
def gaussian_pair(a, b):
    """(z_even, z_odd) from two uint32 blocks."""
    r = (radius(a).to(tl.uint32, bitcast=True) ^ (b & 0x80000000)).to(tl.float32, bitcast=True)
    even, odd = turn(b)
    return even * r, odd * r
