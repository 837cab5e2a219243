"""Philox4x32: random words as a pure function of (key, counter), with no state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). Four counter words and two
key words, 32 bits each. One round multiplies two of the words by constants to 64 bits, xors the high halves
with the other two words and the key, and keeps the low halves:

    c0' = hi(M1 c2) ^ c1 ^ k0      c1' = lo(M1 c2)
    c2' = hi(M0 c0) ^ c3 ^ k1      c3' = lo(M0 c0)      then k0 += W0, k1 += W1

The paper finds that 7 rounds pass all of BigCrush and proposes 10 for safety. We use 7: training noise need not be
secret, and the rounds are most of the arithmetic of a step. ROUNDS is part of the format of a run: its journal
holds seeds, and replay must draw the same words.

The counter in this package is (g low, g high, stream, step), g a group of elements (tiles.py defines it); the key is
the halves of the seed. The products of two rounds then involve only numbers that a whole launch shares: both versions
below take plain ints (scalars in the kernel) for such words and skip that work.
"""

import torch

from keyhole.ops.backend import jit, tl

ROUNDS = 7
MASK_32 = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85

_ROUNDS = tl.constexpr(ROUNDS)
_M0, _M1 = tl.constexpr(MULTIPLIER_0), tl.constexpr(MULTIPLIER_1)
_W0, _W1 = tl.constexpr(WEYL_0), tl.constexpr(WEYL_1)

Word = torch.Tensor | int


def _mix(product: Word, word: Word, key: int) -> Word:
    """hi(product) ^ word ^ key. Bits of `word` above 32 do not matter; tensors are changed in place."""
    high = product >> 32
    high ^= word
    high ^= key
    high &= MASK_32
    return high


def _low(product: Word) -> Word:
    """The low half. A tensor is not masked: the next reader masks it, which saves a pass over memory."""
    return product & MASK_32 if isinstance(product, int) else product


def philox_reference(c0: Word, c1: Word, c2: Word, c3: Word, seed: int, rounds: int = ROUNDS) -> tuple[Word, ...]:
    """Four words in 0..2^32-1, int64 where any counter word they depend on is an int64 tensor."""
    k0, k1 = seed & MASK_32, seed >> 32
    for _ in range(rounds):
        product0, product1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1  # tensors wrap modulo 2^64, as they should
        c0, c1, c2, c3 = _mix(product1, c1, k0), _low(product1), _mix(product0, c3, k1), _low(product0)
        k0, k1 = (k0 + WEYL_0) & MASK_32, (k1 + WEYL_1) & MASK_32
    return c0, c1 & MASK_32, c2, c3 & MASK_32


@jit()
def philox(c0, c1, c2, c3, k0, k1):
    """The same in a kernel: uint32 blocks or scalars in, four uint32 words out."""
    for _ in tl.static_range(_ROUNDS):
        product0, product1 = c0.to(tl.uint64) * _M0, c2.to(tl.uint64) * _M1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = k0 + _W0
        k1 = k1 + _W1
    return c0, c1, c2, c3
