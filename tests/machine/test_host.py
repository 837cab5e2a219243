"""Host memory: the tightest control group counts, in both versions of the file system."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.machine.host import cpu_count, host_memory, host_sum

GIB = 2**30


def machine(tmp_path: Path, groups: dict[str, dict[str, str]], own: str) -> tuple[Path, Path]:
    """A fake /proc with 64 GiB (48 available) and a fake control group tree."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\nHugePages_Total: 0\n")
    (proc / "self" / "cgroup").write_text(own)
    for directory, files in groups.items():
        (root / directory).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / directory / name).write_text(text)
    return proc, root


def v2(limit: object, used: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


LIMITS = {
    "max is no limit": ({".": v2("max", 9)}, "/", 48 * GIB, None),
    "limit - used + inactive cache": ({".": v2(16 * GIB, 10 * GIB, 3 * GIB)}, "/", 9 * GIB, 16 * GIB),
    "a slice above": ({"a": v2(20 * GIB, 19 * GIB), "a/b": v2(8 * GIB, 2 * GIB)}, "/a/b", GIB, 8 * GIB),
    "nothing left, and never less": ({".": v2(16 * GIB, 17 * GIB)}, "/", 0, 16 * GIB),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_tightest_limit_of_a_container_counts(tmp_path: Path, name: str) -> None:
    groups, own, available, limit = LIMITS[name]
    memory = host_memory(*machine(tmp_path, groups, f"0::{own}\n"))
    assert (memory.total_bytes, memory.available_bytes, memory.cgroup_limit_bytes) == (64 * GIB, available, limit)


def test_version_1(tmp_path: Path) -> None:
    """The older layout is read, and its huge number means no limit."""
    files = {
        "memory.limit_in_bytes": str(4 * GIB),
        "memory.usage_in_bytes": str(GIB),
        "memory.stat": f"cache 7\ntotal_inactive_file {GIB // 2}\n",
    }
    no_limit = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5"}
    groups = {"memory": no_limit, "memory/docker/x": files}
    memory = host_memory(*machine(tmp_path, groups, "5:cpu,cpuacct:/\n4:memory:/docker/x\n0::/\n"))
    assert (memory.available_bytes, memory.cgroup_limit_bytes) == (3 * GIB + GIB // 2, 4 * GIB)


def test_this_machine() -> None:
    """Real numbers are in order."""
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes and cpu_count() >= 1


def test_without_proc_the_system_is_asked(tmp_path: Path) -> None:
    """Where there is no /proc, the total counts as available."""
    memory = host_memory(tmp_path, tmp_path)
    assert memory.total_bytes == memory.available_bytes > 0


@given(st.integers(0, 2**45), st.integers(0, 2**31), st.integers(0, 2**40))
def test_the_numbers_of_a_message_add_up(needed: int, slack: int, available: int) -> None:
    """`22.66 GiB, only 21.75 free: 1.91 missing` leaves the reader to guess what the rest is for."""
    if needed + slack > available:
        cents = [round(100 * float(x)) for x in re.findall(r"([0-9.]+) GiB", host_sum(needed, slack, available))]
        need, *own, free, missing = cents
        assert need + sum(own) - free == missing > 0 and abs(need - 100 * needed / 2**30) <= 1
