"""Where the kernels under test run: on the GPU if there is one, else interpreted on the CPU (interpreted.py)."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of a kernel

from keyhole.ops import backend
from tests.ops.interpreted import replaced_once  # noqa: F401


def kernel_device_or_skip() -> torch.device:
    """A device the kernels can run on. For hypothesis, which does not like fixtures."""
    if backend.TRITON_MISSING:
        pytest.skip("needs Triton")
    return torch.device("cpu") if backend.INTERPRETED else cuda_device()


@pytest.fixture
def kernel_device() -> torch.device:
    return kernel_device_or_skip()


@pytest.fixture
def cuda() -> torch.device:
    """A real GPU with compiled kernels."""
    if backend.INTERPRETED:
        pytest.skip("kernels are interpreted: unset TRITON_INTERPRET")
    return cuda_device()


def cuda_device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
