"""Copies by several threads are copies."""

import pytest
import torch

from keyhole.checkpoint.snapshot.copy_threads import SMALL_BYTES, CopyThreads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 5, SMALL_BYTES + 13])
def test_every_byte_arrives(numel: int, dtype: torch.dtype) -> None:
    """Whatever the length: shared out or not."""
    source = torch.randint(0, 255, (numel,), generator=torch.Generator().manual_seed(numel)).to(dtype)
    target = torch.zeros(numel, dtype=dtype)
    CopyThreads(3).copy(target, source)
    assert torch.equal(target, source)
