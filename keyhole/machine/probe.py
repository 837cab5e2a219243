"""Facts about this machine: versions, cores, host memory, GPUs, and the speed of the link between the two.

    environment() -> a JSON-able dict            `keyhole env` prints it, a run stores it in run/env.json
    link_speed()  -> GB/s up, down, both ways    pinned copies of 64 MiB, the size of a block; about 0.1 s

Link rates are in GB/s (10^9), as on data sheets; everything else is in bytes."""

import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.host import cpu_count, host_memory, installed_version, read_text, versions
from keyhole.machine.rates import WORKSPACE_BYTES, WORKSPACE_BYTES_9

LINK_PROBE_BYTES = 64 * 2**20


def gpus() -> list[dict[str, Any]]:
    rows = []
    for index in range(accelerator.device_count()):
        p = accelerator.get_device_properties(index)
        free_bytes, total_bytes = accelerator.mem_get_info(index)
        row = {"name": p.name, "capability": f"{p.major}.{p.minor}"}
        rows.append(row | {"total_bytes": total_bytes, "free_bytes": free_bytes})
    return rows


def workspace_bytes(device: torch.device) -> int:
    """The workspace that cuBLAS reserves per thread."""
    if device.type != ACCELERATOR:
        return 0
    return WORKSPACE_BYTES_9 if accelerator.get_device_capability(device)[0] >= 9 else WORKSPACE_BYTES


def copy_speed(copies: list[tuple[torch.Tensor, torch.Tensor, accelerator.Stream]], rounds: int) -> float:
    """GB/s of copying (target, source) on its stream, in turn; all streams at once."""
    for repeat in (1, rounds):  # the first round is a warm-up
        accelerator.synchronize()
        begin_s = time.perf_counter()
        for target, source, stream in copies * repeat:
            with accelerator.stream(stream):
                target.copy_(source, non_blocking=True)
        accelerator.synchronize()
        seconds = time.perf_counter() - begin_s
    return float(sum(source.nbytes for _, source, _ in copies) * rounds / seconds / 1e9)


def link_speed(rounds: int = 16) -> dict[str, float]:
    """Measured GB/s of pinned copies on the current CUDA device: up, down, and each way when both run."""
    host = [torch.empty(LINK_PROBE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(LINK_PROBE_BYTES, dtype=torch.uint8, device=ACCELERATOR) for _ in range(2)]
    up = (device[0], host[0], accelerator.Stream())
    down = (host[1], device[1], accelerator.Stream())
    found = {"host_to_device": copy_speed([up], rounds), "device_to_host": copy_speed([down], rounds)}
    found["both_ways"] = copy_speed([up, down], rounds) / 2
    return {name: round(rate, 1) for name, rate in found.items()}


def triton_state() -> str:
    if installed_version("triton") is None:
        return "the PyTorch references are used"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted (TRITON_INTERPRET=1): for tests, slow"
    return "usable" if accelerator.is_available() else "installed, but no GPU: the references are used"


def environment(*, measure_link: bool = False) -> dict[str, Any]:
    """Everything above in one JSON-able dict; the link is measured only on request (and if there is a GPU). cuda: that
    of the torch build (None for a CPU build) and of the driver (None without one)."""
    found_gpus, driver = gpus(), read_text(Path("/proc/driver/nvidia/version")).partition("\n")[0].split()
    link: dict[str, float] | str | None = None
    if measure_link and found_gpus:
        try:
            link = link_speed()
        except RuntimeError as error:  # of CUDA, or out of memory: the other facts are needed most then
            link = f"not measured: {error}".partition("\n")[0]
    return {
        "versions": versions(),
        "os": platform.platform(),
        "cpu": {"name": cpu_name(), "cores": cpu_count()},
        "host_memory": asdict(host_memory()),
        "cuda": {
            "built_for": torch.version.cuda,
            "driver": next((word for word in driver if word[:1].isdigit() and "." in word), None),
        },
        "gpus": found_gpus,
        "triton": triton_state(),
        "link_gb_s": link,
    }


def cpu_name() -> str:
    """The model of the CPU."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
