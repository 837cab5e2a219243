"""Rates of the link between host and device, measured with the copies that streaming makes.

    up       pinned host memory -> device, alone
    down     device -> pinned host memory, alone
    duplex   each way while both run with the same number of bytes, as in a streamed step

GB/s (10^9 bytes), each way. A copy has the size of a unit; the host side cycles through several buffers, so that
memory and not a cache is measured, and is pinned in the same way as the weights (arena.py). The floors use the *best*
of a few rounds, because a floor is what the link can do; the median is reported beside it.
"""

import statistics
import time

import torch

from keyhole.offload import arena

ROUND_BYTES = 2**32  # one way, per round
HOST_BYTES = 2**30  # one way, at least two buffers


class _Copies:
    """Host buffers, device buffers and a stream for one direction."""

    def __init__(self, unit_bytes: int, up: bool) -> None:
        count = max(2, HOST_BYTES // unit_bytes)
        self.host = arena.host_memory(count * unit_bytes).fill_(1)
        arena.pin(self.host)
        self.pieces = self.host.split(unit_bytes)
        self.device = torch.zeros(unit_bytes, dtype=torch.uint8, device="cuda")
        self.stream, self.up = torch.cuda.Stream(), up

    def enqueue(self, i: int) -> None:
        piece = self.pieces[i % len(self.pieces)]
        target, source = (self.device, piece) if self.up else (piece, self.device)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def close(self) -> None:
        arena.unpin(self.host)


def _rate_gb_s(directions: list[_Copies], unit_bytes: int, copies: int) -> float:
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for i in range(copies):
        for direction in directions:
            direction.enqueue(i)
    torch.cuda.synchronize()
    return unit_bytes * copies / (time.perf_counter() - begin_s) / 1e9


def measure_link(unit_bytes: int, rounds: int = 5) -> dict[str, float]:
    """GB/s up, down and duplex for copies of unit_bytes, the best and the median of the rounds."""
    copies = max(4, min(512, ROUND_BYTES // unit_bytes))
    up, down = _Copies(unit_bytes, True), _Copies(unit_bytes, False)
    found: dict[str, float] = {"unit_bytes": unit_bytes}
    try:
        for name, directions in {"up": [up], "down": [down], "duplex": [up, down]}.items():
            _rate_gb_s(directions, unit_bytes, 2)  # warm-up
            rates = [_rate_gb_s(directions, unit_bytes, copies) for _ in range(rounds)]
            found[name], found[f"{name}_median"] = max(rates), statistics.median(rates)
    finally:
        torch.cuda.synchronize()
        up.close()
        down.close()
    return found
