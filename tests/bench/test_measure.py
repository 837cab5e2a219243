"""What the benchmarks measure with."""

import os
import subprocess
import sys

import pytest
import torch

from keyhole.bench.measure import clear_device

BLOCKS = """
import torch
from keyhole.bench.measure import clean_up, host_memory

for _ in range(3):
    clean_up(torch.device("cpu"))
    begin_bytes = host_memory()
    blocks = [torch.ones(2**20) for _ in range(8)]
    del blocks
    print(host_memory() - begin_bytes)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_a_block_is_seen_each_time_it_comes_and_goes() -> None:
    """32 MiB that were freed before the reading count, and the second and third time as much as the first."""
    environment = os.environ | {"MIMALLOC_PURGE_DELAY": "0"}
    done = subprocess.run([sys.executable, "-c", BLOCKS], env=environment, capture_output=True, text=True, check=True)
    mib = [int(line) / 2**20 for line in done.stdout.split()]
    assert len(mib) == 3 and all(28 < value < 48 for value in mib)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_limit_is_removed_from_a_device_with_or_without_an_index(name: str) -> None:
    """torch itself refuses to set the share of "cuda"."""
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    clear_device(torch.device(name))
    assert torch.cuda.get_per_process_memory_fraction(0) == 1.0
