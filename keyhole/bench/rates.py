"""Measured rates of a device and of its link, for the floors: the best of a few rounds, because a floor is what the
hardware can do.

    product_rate   operations per second of one large product of random matrices
    copy_rate      bytes read and written per second by one large copy
    link_rates     GB/s (10^9 bytes) each way, of the copies that streaming makes:
                       up       pinned host memory -> device, alone
                       down     device -> pinned host memory, alone
                       duplex   each way while both run with the same number of bytes, as in a streamed step
                   with the median of the rounds beside the best. A copy has the size of a unit; the host side cycles
                   through several buffers, so that memory and not a cache is measured, and is pinned as weights are.
"""

import statistics
import time
from collections.abc import Callable

import torch

from keyhole.bench.measure import wait
from keyhole.machine.probe import copy_speed
from keyhole.offload import arena

SIDE = {"cuda": 8192, "cpu": 2048}  # side of the matrices
COPY_BYTES = {"cuda": 2**32, "cpu": 2**30}
ROUNDS = 6
ROUND_BYTES, HOST_BYTES = 2**32, 2**30  # of the link, one way: per round, and of at least two host buffers


def product_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int | None = None) -> float:
    """FLOP/s."""
    side = side or SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _best_s(lambda: a @ b, device)


def copy_rate(device: torch.device, size_bytes: int | None = None) -> float:
    """Bytes per second, read and written bytes together."""
    source = torch.ones((size_bytes or COPY_BYTES[device.type]) // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: target.copy_(source), device)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call; on a GPU ten calls are queued at a time."""
    at_once, best_s = 10 if device.type == "cuda" else 1, float("inf")
    for _ in range(ROUNDS):
        wait(device)
        begin_s = time.perf_counter()
        for _ in range(at_once):
            work()
        wait(device)
        best_s = min(best_s, (time.perf_counter() - begin_s) / at_once)
    return best_s


def link_rates(unit_bytes: int, rounds: int = 5) -> dict[str, float]:
    """Rates up, down and duplex for copies of unit_bytes."""
    count = max(2, HOST_BYTES // unit_bytes)
    host = arena.host_memory(2 * count * unit_bytes).fill_(1)
    arena.pin(host)
    device = [torch.zeros(unit_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pieces, streams = host.split(unit_bytes), (torch.cuda.Stream(), torch.cuda.Stream())
    up = [(device[0], piece, streams[0]) for piece in pieces[:count]]
    down = [(piece, device[1], streams[1]) for piece in pieces[count:]]
    both = [copy for pair in zip(up, down, strict=True) for copy in pair]
    repeat, found = max(1, ROUND_BYTES // (count * unit_bytes)), dict[str, float](unit_bytes=unit_bytes)
    try:
        for name, copies, ways in (("up", up, 1), ("down", down, 1), ("duplex", both, 2)):
            rates = [copy_speed(copies, repeat) / ways for _ in range(rounds)]
            found[name], found[f"{name}_median"] = max(rates), statistics.median(rates)
    finally:
        torch.cuda.synchronize()
        arena.unpin(host)
    return found
