"""Measures seconds per step, and bytes on the device and on the host.

The host waits for each warm-up step, so that decisions that depend on measured steps (how often `zo` writes back) are
made before the timing. Timed steps are queued as in a run: one after the other, with a CUDA event between each two and
no synchronisation before the last, so the upload of step t + 1 may begin in step t. The wall clock over all timed
steps, waiting at the end for every stream, is reported beside the median of the events.

Rates, for the floors, are the best of a few rounds, because a floor is what the hardware can do:

    product_rate   operations per second of one large product of random matrices
    copy_rate      bytes read and written per second by one large copy
    link_rates     GB/s (10^9 bytes) each way, of the copies that streaming makes:
                       up       pinned host memory -> device, alone
                       down     device -> pinned host memory, alone
                       duplex   each way while both run with the same number of bytes, as in a streamed step
                   with the median of the rounds beside the best. A copy has the size of a unit; the host side cycles
                   through several buffers, so that memory and not a cache is measured, and is pinned as weights are.

Device memory is the peak that PyTorch's allocator reserved and allocated from the first step on (memory for making
random weights is freed before). Host memory is the peak resident set of the process, pinned weights included.
"""

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from keyhole.bench.report import Record
from keyhole.machine.gpu import ACCELERATOR, accelerator, free_memory
from keyhole.machine.probe import copy_speed
from keyhole.offload import arena
from keyhole.offload.engine import Engine
from keyhole.plan.measure import best_s, product, wait

Mark = float | accelerator.Event
SIDE = {"cuda": 8192, "cpu": 2048}  # of the matrices of a product
COPY_BYTES = {"cuda": 2**32, "cpu": 2**30}
ROUND_BYTES, HOST_BYTES = 2**32, 2**30  # of the link, one way: per round, and of at least two host buffers


def device_of(name: str) -> torch.device:
    """The first GPU by its index, which some of torch's functions require."""
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def random_batch(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """A batch of random tokens, the same for every system."""
    ids_BT = torch.randint(4, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids_BT, "labels": ids_BT}


def time_steps(step: Callable[[], torch.Tensor], engine: Engine, warm_up: int, timed: int) -> Record:
    """Runs warm_up + timed steps; returns seconds and bytes over the link per timed step, and the losses of all
    steps."""
    device, losses = engine.device, []
    for _ in range(warm_up):
        losses.append(step())
        wait(device)
    up, down, begin_s = engine.bytes_up, engine.bytes_down, time.perf_counter()
    marks = [_mark(device)]
    for _ in range(timed):
        losses.append(step())
        marks.append(_mark(device))
    wait(device)
    wall_s = (time.perf_counter() - begin_s) / timed
    steps_s = [_seconds(a, b) for a, b in zip(marks, marks[1:], strict=False)]
    return {
        "step_s": statistics.median(steps_s),
        "min_s": min(steps_s),
        "max_s": max(steps_s),
        "wall_s": wall_s,
        "steps_s": steps_s,
        "losses": [float(loss) for loss in losses],
        "bytes_up": (engine.bytes_up - up) // timed,
        "bytes_down": (engine.bytes_down - down) // timed,
    }


def time_parts(
    parts: dict[str, Callable[[], object]], device: torch.device, warm_up: int, timed: int
) -> dict[str, dict[str, float]]:
    """Runs the parts in order, warm_up + timed times; returns median, minimum and maximum seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for i in range(warm_up + timed):
        marks = [_mark(device)]
        for work in parts.values():
            work()
            marks.append(_mark(device))
        wait(device)
        if i >= warm_up:
            for name, begin, end in zip(parts, marks, marks[1:], strict=False):
                seconds[name].append(_seconds(begin, end))
    return {name: {"s": statistics.median(s), "min_s": min(s), "max_s": max(s)} for name, s in seconds.items()}


def _mark(device: torch.device) -> Mark:
    if device.type != ACCELERATOR:
        return time.perf_counter()
    event = accelerator.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both are of one kind
    return float(begin.elapsed_time(end) / 1e3)


def clean_up(device: torch.device) -> None:
    """Frees unused memory, and resets the peaks (that of the host where the system allows it). Workspaces stay: graphs
    that were captured use them."""
    gc.collect()
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    if device.type == ACCELERATOR:
        accelerator.synchronize(device)
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def clear_device(device: torch.device) -> None:
    """The same after a model is closed; frees workspaces of its graphs and removes its memory limit too."""
    free_memory()
    clean_up(device)
    if device.type == ACCELERATOR:
        accelerator.set_per_process_memory_fraction(1.0, device.index)  # None: the current one; "cuda" is refused


def device_memory(device: torch.device) -> dict[str, int]:
    """Peaks since clean_up, and the memory in use on the whole device (CUDA context included)."""
    if device.type != ACCELERATOR:
        return {"reserved_bytes": 0, "allocated_bytes": 0, "in_use_bytes": 0, "alloc_retries": 0}
    free, total = accelerator.mem_get_info(device)
    return {
        "reserved_bytes": accelerator.max_memory_reserved(device),
        "allocated_bytes": accelerator.max_memory_allocated(device),
        "in_use_bytes": total - free,
        "alloc_retries": accelerator.memory_stats(device).get("num_alloc_retries", 0),  # each waits for the device
    }


def host_memory() -> int:
    """Peak resident set of this process since clean_up, in bytes; the current one where the peak cannot be reset."""
    key = "VmHWM:" if os.access("/proc/self/clear_refs", os.W_OK) else "VmRSS:"
    status = Path("/proc/self/status").read_text().split(key)
    return int(status[1].split()[0]) * 1024 if len(status) == 2 else 0


def product_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int | None = None) -> float:
    """FLOP/s."""
    side = side or SIDE[device.type]
    return product(device, dtype, side, side, side)


def copy_rate(device: torch.device, size_bytes: int | None = None) -> float:
    """Bytes per second, read and written bytes together."""
    source = torch.ones((size_bytes or COPY_BYTES[device.type]) // 4, device=device)
    target, repeat = torch.empty_like(source), 10 if device.type == ACCELERATOR else 1
    return 2 * source.nbytes / best_s(lambda: target.copy_(source), device, repeat=repeat)


def link_rates(unit_bytes: int, rounds: int = 5) -> dict[str, float]:
    """Rates up, down and duplex for copies of unit_bytes."""
    count = max(2, HOST_BYTES // unit_bytes)
    host = arena.host_memory(2 * count * unit_bytes).fill_(1)
    arena.pin(host)
    device = [torch.zeros(unit_bytes, dtype=torch.uint8, device=ACCELERATOR) for _ in range(2)]
    pieces, streams = host.split(unit_bytes), (accelerator.Stream(), accelerator.Stream())
    up = [(device[0], piece, streams[0]) for piece in pieces[:count]]
    down = [(piece, device[1], streams[1]) for piece in pieces[count:]]
    both = [copy for pair in zip(up, down, strict=True) for copy in pair]
    repeat, found = max(1, ROUND_BYTES // (count * unit_bytes)), dict[str, float](unit_bytes=unit_bytes)
    try:
        for name, copies, ways in (("up", up, 1), ("down", down, 1), ("duplex", both, 2)):
            rates = [copy_speed(copies, repeat) / ways for _ in range(rounds)]
            found[name], found[f"{name}_median"] = max(rates), statistics.median(rates)
    finally:
        accelerator.synchronize()
        arena.unpin(host)
    return found
