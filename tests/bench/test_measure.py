"""What the benchmarks measure with."""

import pytest
import torch

from keyhole.bench.measure import clear_device


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_limit_is_removed_from_a_device_with_or_without_an_index(name: str) -> None:
    """torch itself refuses to set the share of "cuda"."""
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    clear_device(torch.device(name))
    assert torch.cuda.get_per_process_memory_fraction(0) == 1.0
