"""Peak memory: what comes and goes is seen, every time anew, and a process that fails says nothing."""

import os
import subprocess
import sys

import pytest

from keyhole.demo.peak_memory import CLEAR, measured_beside

BLOCKS = """
import torch
from keyhole.demo.peak_memory import begin_peak, resident_bytes

for _ in range(3):
    begin_bytes = begin_peak()
    blocks = [torch.ones(2**20) for _ in range(8)]
    del blocks
    print(resident_bytes("VmHWM") - begin_bytes)
"""


@pytest.mark.skipif(not CLEAR.exists(), reason="needs Linux's /proc")
def test_a_block_is_seen_each_time_it_comes_and_goes() -> None:
    """32 MiB that were freed before the reading count, and the second and third time as much as the first."""
    environment = os.environ | {"MIMALLOC_PURGE_DELAY": "0"}
    done = subprocess.run([sys.executable, "-c", BLOCKS], env=environment, capture_output=True, text=True, check=True)
    mib = [int(line) / 2**20 for line in done.stdout.split()]
    assert len(mib) == 3 and all(28 < value < 48 for value in mib)


@pytest.mark.slow
@pytest.mark.skipif(not CLEAR.exists(), reason="needs Linux's /proc")
@pytest.mark.matrix
def test_methods_are_measured_in_a_process_of_their_own() -> None:
    """A method needs at least the weights and far less than a library."""
    with measured_beside(["zo"], "cpu") as peaks:
        found = peaks()
    assert found.keys() == {"zo"}
    assert all(2**20 < host < 200 * 2**20 and gpu == 0 for host, gpu in found.values())


@pytest.mark.parametrize("output", ["", "Traceback", "{", "[]\n1 2\n"])
def test_a_process_that_fails_says_nothing(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No result is no number, not an error: the demo goes on."""
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: real(["printf", "%s", output], **how))
    with measured_beside(["zo"], "cpu") as peaks:
        assert peaks() == {}
