"""Host memory and cores that this process can actually use, and the versions of what is installed.

In a container the limit is that of the control group, which is reached long before the machine is full: the process is
then killed with exit -9 and no message. So the limits of all groups above the process are read (both versions of the
control group file system), and "available" is the memory that can be used without swapping or being killed:

    available = min(MemAvailable, limit - used + inactive_file)        over all groups with a limit

Page cache counts as used in a group but is freed on demand; hence inactive_file. This file does not import torch.
"""

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import keyhole
from keyhole.machine.sizes import GIB

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "datasets")
NO_LIMIT_BYTES = 2**60  # version 1 writes a huge number for "no limit"


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory: in the machine, available, and the smallest limit of a group (None = no limit)."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None


def read_text(path: Path) -> str:
    """The file's text; "" if there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _table(text: str) -> dict[str, int]:
    """Name -> number, from lines such as `MemTotal:  24623592 kB` or `inactive_file 4096`."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _groups(root: Path, proc_cgroup: str) -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) of this process's memory groups and all above them, as far as they have a limit."""
    for line in proc_cgroup.splitlines():
        number, controllers, own = (line.split(":", 2) + ["", "", ""])[:3]
        is_v2 = number == "0"
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        limits = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        directory = root if is_v2 else root / "memory"
        for part in ("", *(part for part in own.split("/") if part and part != "..")):
            directory /= part
            limit, used = (read_text(directory / name).strip() for name in limits)
            if limit.isdigit() and int(limit) < NO_LIMIT_BYTES and used.isdigit():
                stat = _table(read_text(directory / "memory.stat"))
                cache = stat.get("inactive_file" if is_v2 else "total_inactive_file", 0)
                yield int(limit), max(0, int(limit) - int(used) + cache)


def host_memory(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Host memory in bytes; on systems without /proc the total counts as available."""
    info = {name: kib * 1024 for name, kib in _table(read_text(proc / "meminfo")).items()}
    total = info.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = list(_groups(cgroup_root, read_text(proc / "self" / "cgroup")))
    available = min([info.get("MemAvailable", total), *(left for _, left in groups)])
    return HostMemory(total, available, min((limit for limit, _ in groups), default=None))


def host_sum(needed: int, slack: int, available: int) -> str:
    """`22.66 GiB and 1.00 GiB for the process itself, of which 21.75 GiB are free: 1.91 GiB are missing`. The
    printed numbers add up."""
    cents = [-(-100 * count // GIB) for count in (needed, slack)] + [100 * available // GIB]
    missing = cents[0] + cents[1] - cents[2]
    need, reserve, free, lack = (f"{count / 100:.2f} GiB" for count in (*cents, missing))
    own = f" and {reserve} for the process itself" if slack else ""
    return f"{need}{own}, of which {free} are free: {lack} are missing"


def cpu_count() -> int:
    """Cores this process may use; in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_has_bf16(proc: Path = Path("/proc")) -> bool:
    """Whether the CPU has bfloat16 arithmetic (x86: AVX-512 BF16 or AMX; ARM: BF16). Unknown counts as yes."""
    words = read_text(proc / "cpuinfo").split()
    return not words or bool({"bf16", "avx512_bf16", "amx_bf16"} & set(words))


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"keyhole": keyhole.__version__, "python": platform.python_version()}
    return found | {name: installed_version(name) for name in PACKAGES}


@cache
def installed_version(name: str) -> str | None:
    """The version of a package, cached: finding it searches directories and parses a file of a hundred kilobytes."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
