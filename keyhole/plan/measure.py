"""How fast this machine is, measured in a few seconds, and kept from one call to the next.

    products        [rows, 4096] x [4096, 8192] in bf16 for a few numbers of rows, and one in fp32; smaller on a CPU. On
                    a GPU in rounds of ROUND_S: its clock falls under load, within a few milliseconds
    device_memory   c = a + b on 64 Mi numbers
    link            page-locked copies of 64 MiB (machine/probe.py), at two moments: once the first said 33 GB/s where
                    steps then uploaded at 53 (benchmarks/records/plan_check_h200_2026-11-17_e.json)
    host_memory     a copy of 256 MiB by all threads; or the bytes of AdamW, if it moved more: a copy also reads what it
                    overwrites
    adam            the CPU's own kernel (ops/adam.py) on 32 Mi parameters, more than caches hold

Each is the best of a few rounds, the first of which warms up. What the host needs to launch a kernel is a constant
(machine/rates.py): it decides below 3B alone, where a plan is right within a factor of two.

The result is kept in the user's cache (disk/files.py), by GPU, CPU, cores and version of torch. If the file cannot
be read, the machine is measured again; a failure to write it is said. `known` never measures:
a run that starts uses it.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from keyhole.disk.files import cache_directory, make_directories, write_text
from keyhole.disk.json_text import read_json
from keyhole.errors import UserError
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.host import cpu_count, host_memory
from keyhole.machine.probe import cpu_name, link_speed, workspace_bytes
from keyhole.machine.rates import VERSION, Rates
from keyhole.machine.sizes import MIB
from keyhole.ops.adam import host_adamw_
from keyhole.plan.seconds import profile_of

ROWS_GPU, ROWS_CPU = (128, 512, 2048, 8192), (64, 512)
ROUND_S = 0.05
ADAM_BYTES = 28  # per parameter (ops/adam.py)
LIMIT_BYTES = 2**20  # of the file


def measure(device: torch.device) -> Rates:
    """Measures now."""
    cuda, memory = device.type == ACCELERATOR, host_memory()
    links = list[dict[str, float]]()

    def between() -> None:
        if cuda:
            with accelerator.device(device):
                links.append(link_speed())

    between()
    host_rate, adam, products = host_memory_rate(), adam_rate(), products_of(device)
    between()
    shape = (2048, 4096, 8192) if cuda else (512, 512, 1024)
    ways = ("host_to_device", "device_to_host", "both_ways")
    up, down, both = (max((1e9 * link[way] for link in links), default=host_rate / 2) for way in ways)
    try:
        return Rates(
            name=accelerator.get_device_name(device) if cuda else f"{cpu_name()}, {cpu_count()} cores",
            measured=True,
            gpu_bytes=accelerator.get_device_properties(device).total_memory if cuda else None,
            host_bytes=min(memory.cgroup_limit_bytes or memory.total_bytes, memory.total_bytes),
            products=products,
            products_fp32=product(device, torch.float32, *shape),
            device_memory=_device_memory(device) if cuda else host_rate,
            up=up,
            down=down,
            both=both,
            host_memory=max(host_rate, ADAM_BYTES * adam),
            adam=adam,
            workspace_bytes=workspace_bytes(device),
        )
    finally:
        if cuda:
            accelerator.empty_cache()


def best_s(run: Callable[[], object], device: torch.device, rounds: int = 4, repeat: int = 1) -> float:
    """Seconds of one run, the best of a few rounds."""
    best = float("inf")
    for _ in range(rounds + 1):  # the first round is a warm-up
        wait(device)
        begin_s = time.perf_counter()
        for _ in range(repeat):
            run()
        wait(device)
        best = min(best, (time.perf_counter() - begin_s) / repeat)
    return max(best, 1e-9)


def wait(device: torch.device) -> None:
    if device.type == ACCELERATOR:
        accelerator.synchronize(device)


def products_of(device: torch.device) -> dict[int, float]:
    if device.type == ACCELERATOR:
        return {rows: product(device, torch.bfloat16, rows, 4096, 8192) for rows in ROWS_GPU}
    return {rows: product(device, torch.float32, rows, 512, 1024) for rows in ROWS_CPU}


def product(device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
    """FLOP/s of a product. Values are random, because a GPU multiplies zeros faster."""
    a = torch.randn(rows, inner, device=device, dtype=dtype)
    b = torch.randn(inner, columns, device=device, dtype=dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    run, repeat = partial(torch.mm, a, b, out=out), 1
    if device.type == ACCELERATOR:
        repeat = max(8, int(ROUND_S / best_s(run, device, rounds=2, repeat=8)))
    return 2.0 * rows * inner * columns / best_s(run, device, repeat=repeat)


def _device_memory(device: torch.device) -> float:
    a, b = (torch.zeros(64 * MIB, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 6.0 * a.numel() / best_s(lambda: torch.add(a, b, out=out), device)


def host_memory_rate() -> float:
    """Bytes/s of a copy by all threads."""
    a = torch.zeros(256 * MIB, dtype=torch.uint8)
    b = torch.zeros_like(a)
    return 2.0 * a.numel() / best_s(lambda: b.copy_(a), torch.device("cpu"), rounds=3)


def adam_rate() -> float:
    """Parameters/s of the CPU's AdamW."""
    w, m, v = (torch.zeros(32 * MIB) for _ in range(3))
    grad = torch.zeros(32 * MIB, dtype=torch.bfloat16)
    seconds = best_s(lambda: host_adamw_(w, m, v, grad, grad, step=1, lr=1e-5), torch.device("cpu"), rounds=3)
    return w.numel() / seconds


def cache_file(device: torch.device) -> Path | None:
    """The file with a kept measurement, named by GPU, CPU, cores and version of torch; None if the user has no cache
    directory."""
    gpu = accelerator.get_device_name(device) if device.type == ACCELERATOR else "no GPU"
    key = f"{VERSION} | {gpu} | {cpu_name()} | {cpu_count()} cores | torch {torch.__version__}"
    directory = cache_directory("rates")
    return None if directory is None else directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def known(device: torch.device) -> Rates | None:
    """The rates measured here before, or the profile of this GPU; None if there is neither."""
    profile = profile_of(accelerator.get_device_name(device)) if device.type == ACCELERATOR else None
    return _kept(device) or profile


def rates_of(device: torch.device, again: bool = False, say: Callable[[str], None] = lambda text: None) -> Rates:
    """The rates of this machine: kept, or measured now. again: measure in any case."""
    found = None if again else _kept(device)
    if found is None:
        say("measuring this machine (once, a few seconds) ...")
        found = measure(device)
        keep(device, found, say)
    return found


def _kept(device: torch.device) -> Rates | None:
    path = cache_file(device)
    with suppress(UserError, ValueError):
        return None if path is None else Rates.from_dict(read_json(path, "rates", LIMIT_BYTES))
    return None


def keep(device: torch.device, found: Rates, say: Callable[[str], None]) -> None:
    """Writes the rates."""
    if (path := cache_file(device)) is None:
        return
    try:
        make_directories(path.parent)
        write_text(path, json.dumps(found.to_dict(), indent=1))
    except OSError as error:
        say(f"the measurement could not be kept in {path}: {error.strerror or error}")
