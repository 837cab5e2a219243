"""Products of small matrices whose bits are the same on every device, whatever the order in which a library sums.

A sum of floating-point numbers depends on its order, and every library has its own. A sum of integers below 2^53 does
not: float64 represents each of them exactly, in any order, fused or not. So both matrices are split into integers,

    x = s (h + l / 2^20)        s a power of two per row; h, l whole numbers, |h| <= 2^20, |l| <= 2^19

and x y^T = s_x s_y^T (h h^T + (h l^T + l h^T) / 2^20 + l l^T / 2^40), four products of integers, each exact as long as
no sum has more than 2^13 terms; longer sums are added piece by piece, in order. What is lost of a row is below 2^-41 of
its largest element. Powers of two are constructed from their bits, since a library's pow may be inexact.

Operations: 8 R S C in float64. Legend: R, S rows; C columns, over which the product sums.
"""

from collections.abc import Iterator
from typing import cast

import torch

BITS = 20
LONGEST = 2 ** (53 - 2 * BITS)  # terms of an exact sum
LEAST, MOST = -900, 900  # exponents of scales


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^e as float64."""
    return ((exponent.to(torch.int64).clamp(LEAST, MOST) + 1023) << 52).view(torch.float64)


def _cut(x_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scale [R, 1], h, l), of finite numbers."""
    _, exponent_R1 = torch.frexp(x_RC.abs().amax(-1, keepdim=True))
    scaled = x_RC * power_of_two(BITS - exponent_R1)
    high = scaled.round()
    return power_of_two(exponent_R1 - BITS), high, ((scaled - high) * 2.0**BITS).round()


def _pieces(x_RC: torch.Tensor, y_SC: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for begin in range(0, x_RC.shape[-1], LONGEST):
        part = slice(begin, begin + LONGEST)
        yield x_RC[..., part].double(), y_SC[..., part].double()


def exact_product(x_RC: torch.Tensor, y_SC: torch.Tensor) -> torch.Tensor:
    """x y^T [.., R, S] in float64, accurate to 2^-40 of the largest elements of its rows."""
    total: torch.Tensor | None = None
    for x, y in _pieces(x_RC, y_SC):
        (x_scale, x_high, x_low), (y_scale, y_high, y_low) = _cut(x), _cut(y)
        y_high, y_low = y_high.mT, y_low.mT
        middle = (x_high @ y_low + x_low @ y_high) * 2.0**-BITS
        product = x_high @ y_high + (middle + (x_low @ y_low) * 2.0 ** (-2 * BITS))
        product = product * x_scale * y_scale.mT
        total = product if total is None else total + product
    return cast(torch.Tensor, total)  # of one piece at least
