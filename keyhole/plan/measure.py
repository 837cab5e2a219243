"""How fast this machine is, measured in a few seconds (kept_rates.py keeps the result).

    products        [rows, 4096] x [4096, 8192] in bf16 for a few numbers of rows, and one in fp32; smaller on a CPU. On
                    a GPU in rounds of ROUND_S: its clock falls under load, within a few milliseconds
    device_memory   c = a + b on 64 Mi numbers
    link            page-locked copies of 64 MiB (machine/probe.py), at two moments: once the first said 33 GB/s where
                    steps then uploaded at 53 (benchmarks/records/plan_check_h200_2026-11-17_e.json)
    host_memory     a copy of 256 MiB by all threads; or the bytes of AdamW, if it moved more: a copy also reads what it
                    overwrites
    adam            the CPU's own kernel (ops/adam.py) on 32 Mi parameters, more than caches hold
    launch          200 additions of one number in place, launched as fast as the host can
    called          the forward pass of a tiny Llama block with autograd, divided by its operations: what Python,
                    modules and autograd's record cost differs from host to host, and is most of a small batch's time
    reversed        its backward pass in the same way: autograd calls operations from C++, in about half the time

Each is the best of a few rounds, the first of which warms up. The last three, the host's, are measured in bursts that
are spread over the time of the other measurements: each is a first quartile of the rounds of BURST_S, after WARM_UP_S
(the first call takes 1.6 times as long, and a clock needs a while to rise), and the least burst counts. A quartile,
because the best round is faster than the usual ones that a step is made of, and the median is slowed down by other
processes on the host. On a Neoverse N1 the best of 12 launches was 5.9 to 6.9 us in four measurements; first quartiles
of 0.1 s beside two busy processes on two cores, in six: `launch` 6.8 to 7.1, `called` 30.3 to 30.6, `reversed` 18.2 to
18.5, while a median of `called` was once 128. On idle cores those of `called` and `reversed` are within 2 % of the
best: constants that were found with the best hold. One burst is not enough: what slows a host down lasts longer than a
tenth of a second. On the host of an H200 one of 0.1 s said 39.1 us for `called`, after steps of `sgd` that took what
they take at 16 us, where the processes before and after it said 15 and 16
(benchmarks/records/plan_check_h200_2026-11-17_c.json).
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from keyhole.machine.host import cpu_count, host_memory
from keyhole.machine.probe import cpu_name, link_speed, workspace_bytes
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import MIB
from keyhole.model.structure.block_counts import block_counts
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.reach import SHORT, call_of
from keyhole.ops.adam import host_adamw_

ROWS_GPU, ROWS_CPU = (128, 512, 2048, 8192), (64, 512)
ROUND_S = 0.05
WARM_UP_S, BURST_S = 0.03, 0.05
LAUNCHES = 200
ADAM_BYTES = 28  # per parameter (ops/adam.py)


def measure(device: torch.device) -> Rates:
    """Measures now."""
    cuda = device.type == "cuda"
    memory = host_memory()
    limit = memory.cgroup_limit_bytes or memory.total_bytes
    host = HostRates(device)
    host.burst()
    host_rate = host_memory_rate()
    host.burst()
    adam = adam_rate()
    host.burst()
    link = {"host_to_device": host_rate / 2e9, "device_to_host": host_rate / 2e9, "both_ways": host_rate / 2e9}
    if cuda:
        with torch.cuda.device(device):
            link = link_speed()
    host.burst()
    products = _products(device)
    host.burst()
    if cuda:
        with torch.cuda.device(device):
            link = {way: max(rate, link[way]) for way, rate in link_speed().items()}
    try:
        return Rates(
            name=torch.cuda.get_device_name(device) if cuda else f"{cpu_name()}, {cpu_count()} cores",
            measured=True,
            gpu_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else None,
            host_bytes=min(limit, memory.total_bytes),
            products=products,
            products_fp32=_product(
                device, torch.float32, 2048 if cuda else 512, *((4096, 8192) if cuda else (512, 1024))
            ),
            device_memory=_device_memory(device) if cuda else host_rate,
            up=link["host_to_device"] * 1e9,
            down=link["device_to_host"] * 1e9,
            both=link["both_ways"] * 1e9,
            host_memory=max(host_rate, ADAM_BYTES * adam),
            adam=adam,
            **host.found,
            workspace_bytes=workspace_bytes(device),
        )
    finally:
        if cuda:
            torch.cuda.empty_cache()


def _best_s(run: Callable[[], Any], device: torch.device, rounds: int = 4, repeat: int = 1) -> float:
    """Seconds of one run, the best of a few rounds."""
    best = float("inf")
    for _ in range(rounds + 1):  # the first round is a warm-up
        _wait(device)
        begin_s = time.perf_counter()
        for _ in range(repeat):
            run()
        _wait(device)
        best = min(best, (time.perf_counter() - begin_s) / repeat)
    return max(best, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _products(device: torch.device) -> dict[int, float]:
    if device.type == "cuda":
        return {rows: _product(device, torch.bfloat16, rows, 4096, 8192) for rows in ROWS_GPU}
    return {rows: _product(device, torch.float32, rows, 512, 1024) for rows in ROWS_CPU}


def _product(device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
    """FLOP/s of a product. Values are random, because a GPU multiplies zeros faster."""
    a = torch.randn(rows, inner, device=device, dtype=dtype)
    b = torch.randn(inner, columns, device=device, dtype=dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    run, repeat = partial(torch.mm, a, b, out=out), 1
    if device.type == "cuda":
        repeat = max(8, int(ROUND_S / _best_s(run, device, rounds=2, repeat=8)))
    return 2.0 * rows * inner * columns / _best_s(run, device, repeat=repeat)


def _device_memory(device: torch.device) -> float:
    a, b = (torch.zeros(64 * MIB, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 6.0 * a.numel() / _best_s(lambda: torch.add(a, b, out=out), device)


def host_memory_rate() -> float:
    """Bytes/s of a copy by all threads."""
    a = torch.zeros(256 * MIB, dtype=torch.uint8)
    b = torch.zeros_like(a)
    return 2.0 * a.numel() / _best_s(lambda: b.copy_(a), torch.device("cpu"), rounds=3)


def adam_rate() -> float:
    """Parameters/s of the CPU's AdamW."""
    w, m, v = (torch.zeros(32 * MIB) for _ in range(3))
    grad = torch.zeros(32 * MIB, dtype=torch.bfloat16)
    seconds = _best_s(lambda: host_adamw_(w, m, v, grad, grad, step=1, lr=1e-5), torch.device("cpu"), rounds=3)
    return w.numel() / seconds


class HostRates:
    """The rates of the host alone: seconds per `launch`, operation `called` and `reversed`, from bursts of a quarter of
    a second, the more the better and the longer apart. The last two are 0 if a block cannot be counted: then they
    follow from a launch (machine/rates.py)."""

    def __init__(self, device: torch.device) -> None:
        one = torch.zeros(1, device=device)

        def launch() -> None:
            for _ in range(LAUNCHES):
                one.add_(1.0)

        self._device = device
        self._runs = {"launch": (launch, _nothing, LAUNCHES)} | _block(device)
        self.bursts: list[dict[str, float]] = []

    def burst(self) -> None:
        """Measures all three once more."""
        each = {name: _host_s(run, before, self._device) / n for name, (run, before, n) in self._runs.items()}
        self.bursts.append({"launch": 0.0, "called": 0.0, "reversed": 0.0} | each)

    @property
    def found(self) -> dict[str, float]:
        """The least of all bursts."""
        return {name: min(burst[name] for burst in self.bursts) for name in self.bursts[0]}


def _nothing() -> None:
    pass


def _block(device: torch.device) -> dict[str, tuple[Callable[[], None], Callable[[], None], int]]:
    """The forward and the backward pass of a tiny block, what runs before each, and the number of its operations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=16)
    with torch.random.fork_rng(devices=[]):
        module = LlamaForCausalLM(config)
    block = find_blocks(module)[0]
    counts, call = block_counts(module, block), call_of(module, block, SHORT)
    if counts is None or call is None:
        return {}
    block.to(device)
    args, kwargs = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, call)
    hidden, *others = args
    hidden = hidden.detach().requires_grad_(True)
    wanted = [hidden, *block.parameters()]
    made: list[torch.Tensor] = []

    @torch.enable_grad()
    def forward() -> None:
        output = block(hidden, *others, **kwargs)
        made[:] = [output if isinstance(output, torch.Tensor) else output[0]]

    def backward() -> None:
        torch.autograd.grad(made[0], wanted, torch.ones_like(made[0]))

    forwards, backwards = counts.forward_kernels, counts.backward_kernels
    return {"called": (forward, _nothing, forwards), "reversed": (backward, forward, backwards)}


def _host_s(run: Callable[[], None], before: Callable[[], None], device: torch.device) -> float:
    """Seconds of the host for a run whose kernels the device need not have finished: the first quartile of the rounds
    of BURST_S."""
    found: list[float] = []
    begin_s = time.perf_counter()
    while (now_s := time.perf_counter()) < begin_s + WARM_UP_S + BURST_S or not found:
        before()
        _wait(device)
        each_s = time.perf_counter()
        run()
        each_s = time.perf_counter() - each_s
        if now_s >= begin_s + WARM_UP_S:
            found.append(each_s)
    _wait(device)
    return max(sorted(found)[len(found) // 4], 1e-9)
