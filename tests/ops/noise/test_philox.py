"""Philox against the vectors published with Random123, and kernel against reference."""

import pytest
import torch

from keyhole.ops.backend import jit, tl
from keyhole.ops.noise.words import MASK_32, philox, philox_reference

PI_COUNTER, PI_KEY = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822
KNOWN = [
    (7, (0, 0, 0, 0), 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (MASK_32,) * 4, (1 << 64) - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, PI_COUNTER, PI_KEY, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, (0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, (MASK_32,) * 4, (1 << 64) - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI_COUNTER, PI_KEY, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "counter", "seed", "words"), KNOWN)
def test_known_answers(rounds: int, counter: tuple[int, ...], seed: int, words: str) -> None:
    expected = [int(word, 16) for word in words.split()]
    assert list(philox_reference(*counter, seed, rounds=rounds)) == expected
    tensors = [torch.tensor([word]) for word in counter]
    assert [int(word) for word in philox_reference(*tensors, seed, rounds=rounds)] == expected
    assert [int(word) for word in philox_reference(tensors[0], *counter[1:], seed, rounds=rounds)] == expected


@jit()
def _words_kernel(counter_ptr, out_ptr, k0, k1, N: tl.constexpr):
    at = tl.arange(0, N)
    c0, c1 = tl.load(counter_ptr + at).to(tl.uint32), tl.load(counter_ptr + N + at).to(tl.uint32)
    c2, c3 = tl.load(counter_ptr + 2 * N + at).to(tl.uint32), tl.load(counter_ptr + 3 * N + at).to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, c3, k0.to(tl.uint32), k1.to(tl.uint32))
    tl.store(out_ptr + at, w0.to(tl.int64))
    tl.store(out_ptr + N + at, w1.to(tl.int64))
    tl.store(out_ptr + 2 * N + at, w2.to(tl.int64))
    tl.store(out_ptr + 3 * N + at, w3.to(tl.int64))


def test_kernel_equals_reference(kernel_device: torch.device) -> None:
    n = 256
    counters_4N = torch.randint(0, 1 << 32, (4, n), generator=torch.Generator().manual_seed(0))
    counters_4N[:, :3] = torch.tensor([0, 1, MASK_32])
    k0, k1 = 0x70000001, 0x12345678
    out_4N = torch.empty_like(counters_4N, device=kernel_device)
    _words_kernel[(1,)](counters_4N.to(kernel_device), out_4N, k0, k1, N=n)
    expected_4N = torch.stack(philox_reference(*counters_4N, k0 | k1 << 32))
    assert torch.equal(out_4N.cpu(), expected_4N)
