"""Noise that is drawn once, in tests that are not about drawing it.

z is a pure function of (seed, step, direction, elements), which tests/ops holds it to. A step asks for it to perturb,
the next one to update, and both again in the streamed twin and in the next test. So are the bits of stochastic
rounding, of which all small tensors of a unit lie in one tile, and each asks for the bits of the whole of it.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

kept_small = lru_cache(maxsize=1)(lru_cache(maxsize=4096))  # draws of small tensors, for the whole process


@lru_cache(maxsize=1)
def kept_tiles(words: Callable[..., Any]) -> Callable[..., Any]:
    """words_reference, of which each tile's words are drawn once."""
    draw = lru_cache(maxsize=1024)(lambda first, count, tile, **options: words(first, count, tile, **options))

    def drawn(start: int, n: int, tile: int, **options: Any) -> Any:
        first, last = start // tile * tile, -(-(start + n) // tile) * tile
        given = draw if last - first <= 4 * tile else words
        return given(first, last - first, tile, **dict(sorted(options.items())))

    return drawn


def draw_once(put: Callable[[Any, str, Any], None]) -> None:
    """Puts these draws into modules that are imported. put: setattr, or a patch's, which is undone."""
    if bits := sys.modules.get("keyhole.ops.rounding.bits"):
        put(bits, "words_reference", kept_tiles(bits.words_reference))
    zo = sys.modules.get("keyhole.ops.zo.flat")
    if zo is None:
        return
    small, large = kept_small(zo.chunk_noise_reference), lru_cache(maxsize=1024)(zo.chunk_noise_reference)

    def drawn(start: int, n: int, **options: Any) -> Any:
        draw = small if n <= 16384 else large
        return draw(start, n, **dict(sorted(options.items()))).clone()  # callers use up what they are given

    put(zo, "chunk_noise_reference", drawn)
