"""Measured rates of arithmetic and memory of a device, for the floors.

product   operations per second of one large product of random matrices, the best of a few runs
copy      bytes read and written per second by one large copy, the best of a few runs
"""

import time
from collections.abc import Callable

import torch

SIDE = {"cuda": 8192, "cpu": 2048}  # side of the matrices
COPY_BYTES = {"cuda": 2**32, "cpu": 2**30}
ROUNDS = 6


def product_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int | None = None) -> float:
    """FLOP/s."""
    side = side or SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _best_s(lambda: a @ b, device)


def copy_rate(device: torch.device, size_bytes: int | None = None) -> float:
    """Bytes per second, read and written bytes together."""
    size_bytes = size_bytes or COPY_BYTES[device.type]
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: target.copy_(source), device)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call; on a GPU ten calls are queued at a time."""
    at_once, best_s = 10 if device.type == "cuda" else 1, float("inf")
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        for _ in range(at_once):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, (time.perf_counter() - begin_s) / at_once)
    return best_s
