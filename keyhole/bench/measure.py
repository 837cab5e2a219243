"""Measures seconds per step, and bytes on the device and on the host.

The host waits for each warm-up step, so that decisions that depend on measured steps (how often `zo` writes back) are
made before the timing. Timed steps are queued as in a run: one after the other, with a CUDA event between each two and
no synchronisation before the last, so the upload of step t + 1 may begin in step t. The wall clock over all timed
steps, waiting at the end for every stream, is reported beside the median of the events.

What else a slow step may be due to is counted over the timed steps: the CPU's seconds of all threads, those in which a
thread was ready and had no core (Linux counts them), those in which the host of a virtual machine gave its cores to
others, how often a thread was taken off its core, and how often the allocator had to give memory back or ask the driver
for more.

Device memory is the peak that PyTorch's allocator reserved and allocated from the first step on (memory for making
random weights is freed before). Host memory is the peak resident set of the process, pinned weights included.
"""

import gc
import os
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from keyhole.machine.free_memory import free_memory
from keyhole.offload.engine import Engine

_can_reset_host_peak = True


def random_batch(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """A batch of random tokens, the same for every system."""
    ids_BT = torch.randint(4, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids_BT, "labels": ids_BT}


def time_steps(step: Callable[[], torch.Tensor], engine: Engine, warm_up: int, timed: int) -> dict[str, Any]:
    """Runs warm_up + timed steps; returns seconds and bytes over the link per timed step, and the losses of all
    steps."""
    device, losses = engine.device, []
    for _ in range(warm_up):
        losses.append(step())
        _wait(device)
    up, down = engine.bytes_up, engine.bytes_down
    used_before, begin_s = _used(device), time.perf_counter()
    marks = [_mark(device)]
    for _ in range(timed):
        losses.append(step())
        marks.append(_mark(device))
    _wait(device)
    wall_s = (time.perf_counter() - begin_s) / timed
    used = {name: (after - used_before[name]) / timed for name, after in _used(device).items()}
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
        "used": used,
    }


def _stolen_s() -> float:
    """Seconds, of all cores since the machine began, in which the hypervisor ran something else on them."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _used(device: torch.device) -> dict[str, float]:
    """Since the process began: seconds on a core and in wait of one, of all threads that are alive; switches that no
    thread asked for; and what the allocator asked of the driver."""
    waited = 0.0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):
            waited += int(path.read_text().split()[1]) / 1e9
    counts = {"cpu_s": time.process_time(), "without_core_s": waited, "stolen_s": _stolen_s()}
    counts["switches"] = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        counts |= {name: stats.get(name, 0) for name in ("num_alloc_retries", "num_device_alloc", "num_device_free")}
    return counts


def time_parts(
    parts: dict[str, Callable[[], None]], device: torch.device, warm_up: int, timed: int
) -> dict[str, dict[str, float]]:
    """Runs the parts in order, warm_up + timed times; returns median, minimum and maximum seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for i in range(warm_up + timed):
        marks = [_mark(device)]
        for work in parts.values():
            work()
            marks.append(_mark(device))
        _wait(device)
        if i >= warm_up:
            for name, begin, end in zip(parts, marks, marks[1:], strict=False):
                seconds[name].append(_seconds(begin, end))
    return {name: {"s": statistics.median(s), "min_s": min(s), "max_s": max(s)} for name, s in seconds.items()}


def replayed_ms(run: Callable[[], Any], repeats: int = 10) -> float:
    """Milliseconds of a run on the GPU: the fastest of three measurements of a CUDA graph of it, so that its launches
    take no time."""
    run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return float(min(times))


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clean_up(device: torch.device) -> None:
    """Frees unused memory and resets the peaks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    reset_host_peak()


def clear_device(device: torch.device) -> None:
    """The same after a model is closed; frees workspaces of its graphs and removes its memory limit too."""
    free_memory()
    clean_up(device)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device.index)  # None: the current one; "cuda" is refused


def device_memory(device: torch.device) -> dict[str, int]:
    """Peaks since clean_up, and the memory in use on the whole device (CUDA context included)."""
    if device.type != "cuda":
        return {"reserved_bytes": 0, "allocated_bytes": 0, "in_use_bytes": 0, "alloc_retries": 0}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "in_use_bytes": total - free,
        "alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),  # each waits for the device
    }


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def host_memory() -> int:
    """Peak resident set of this process since reset_host_peak, in bytes; the current one if the system keeps no
    peak."""
    return max(_status_bytes("VmHWM") if _can_reset_host_peak else 0, _status_bytes("VmRSS"))


def reset_host_peak() -> None:
    """Resets the peak to the current size."""
    global _can_reset_host_peak
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        _can_reset_host_peak = False
