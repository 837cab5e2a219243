"""Host tensors through the device: each element once, what should come home does, and ranges follow each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.methods.adam_offload.lane import SLOTS, Lane, chunk_of
from keyhole.offload import arena

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
DTYPES = [torch.float32, torch.float32, torch.bfloat16]


def tensors(numel: int, device: str) -> list[torch.Tensor]:
    """Three flat host tensors; page-locked for a GPU."""
    flats = []
    for k, dtype in enumerate(DTYPES):
        flat = arena.host_memory(numel * dtype.itemsize).view(dtype)
        flat.copy_(torch.arange(numel) % 97 + k)
        if device == "cuda":
            arena.pin(arena.storage_of(flat), torch.device("cuda"))
        flats.append(flat)
    return flats


@pytest.mark.parametrize("device", DEVICES)
def test_ranges_go_through_one_after_the_other(device: str) -> None:
    """More chunks than slots, a last one that is shorter, twice; the third tensor stays as it was."""
    lane = Lane(DTYPES, torch.device(device), chunk=1000)
    flats, seen = tensors(1000 * (2 * SLOTS + 1) + 10, device), []
    before = [flat.clone() for flat in flats]

    def change(begin: int, chunks: list[torch.Tensor]) -> None:
        seen.append((begin, chunks[0].numel()))
        chunks[0].add_(chunks[2])
        chunks[1].mul_(2)
        chunks[2].zero_()

    ends = [lane.run(flats, 2, change) for _ in range(2)]
    for end in ends:
        end()
    assert sum(count for _, count in seen) == 2 * flats[0].numel() and seen[0] == (0, 1000)
    assert torch.equal(flats[0], before[0] + 2 * before[2].float())
    assert torch.equal(flats[1], 4 * before[1]) and torch.equal(flats[2], before[2])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 64))
def test_every_element_passes_once(numel: int, chunk: int) -> None:
    flats = tensors(numel, "cpu")
    before = flats[1].clone()
    Lane(DTYPES, torch.device("cpu"), chunk).run(flats, 3, lambda begin, chunks: chunks[1].add_(1))()
    assert torch.equal(flats[1], before + 1)


def test_a_chunk_is_no_longer_than_what_goes_through() -> None:
    assert chunk_of(10) == 10 and chunk_of(10**9) == 4 * 2**20
