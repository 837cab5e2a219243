"""Measures seconds per step, and bytes on the device and on the host.

The host waits for each warm-up step, so that decisions that depend on measured steps (how often `zo` writes back) are
made before the timing. Timed steps are queued as in a run: one after the other, with a CUDA event between each two and
no synchronisation before the last, so the upload of step t + 1 may begin in step t. The wall clock over all timed
steps, waiting at the end for every stream, is reported beside the median of the events.

Device memory is the peak that PyTorch's allocator reserved and allocated from the first step on (memory for making
random weights is freed before). Host memory is the peak resident set of the process, pinned weights included.
"""

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from keyhole.bench.report import Record
from keyhole.machine.gpu import free_memory
from keyhole.offload.engine import Engine

Mark = float | torch.cuda.Event
_can_reset_host_peak = True


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
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both are of one kind
    return float(begin.elapsed_time(end) / 1e3)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clean_up(device: torch.device) -> None:
    """Frees unused memory and resets the peaks."""
    global _can_reset_host_peak
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        _can_reset_host_peak = False


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


def host_memory() -> int:
    """Peak resident set of this process since clean_up, in bytes; the current one if the system keeps no peak."""
    key = "VmHWM:" if _can_reset_host_peak else "VmRSS:"
    status = Path("/proc/self/status").read_text().split(key)
    return int(status[1].split()[0]) * 1024 if len(status) == 2 else 0
