"""What a step would take on 1 to 64 GPUs, on paper: bytes over each link, and the longest of all as a floor.

P parameters of b bytes, W = b P; N ranks, K of them per machine; T tokens per micro-batch, one micro-batch per rank, so
that N ranks train on N times the tokens. Rates: F FLOP/s that products reach, M bytes/s of GPU memory, and bytes/s one
way of the link to host memory (PCIe), between GPUs of a machine (NVLink; PCIe where there is none), and of a machine's
network.

    replicas (each rank has all weights; forward passes, 2 per micro-batch)
        compute   4 P T / F + 4 W / M          products; one fused pass: W read, W written, 2 W of perturbed copies
        PCIe      streamed: W up                homes that K ranks share change every 8 steps: 2 W / (8 K) more
        network   a few bytes

    shards (each rank keeps 1 / N; forward, and a reverse that runs blocks again)
        compute   8 P T / F + 3 W / M          2 forward, 2 again, 4 reverse; the update reads and writes
        PCIe      streamed: 2 W / N up, W / N down
        NVLink    3 W (min(N, K) - 1) / min(N, K)     two gathers and one exchange of gradients
        network   3 W (1 - K / N) per machine, if N > K

    floor = max of compute and of each link: with perfect overlap the shorter ones hide behind the longest

The formulas leave out activations, the start of a step, and what a link loses to others: a floor, not a promise. What
ranks send is counted in tests/ranks/test_gradients.py and compared with these bytes; times of one GPU in docs/ranks.md.
"""

from dataclasses import dataclass

from keyhole.bench.shapes import SHAPES, parameter_count
from keyhole.errors import UserError
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS

COUNTS = (1, 2, 4, 8, 16, 32, 64)
SHARED_EVERY = 8


@dataclass(frozen=True)
class Machines:
    """Rates of the hardware: TFLOP/s, and GB/s one way."""

    tflops: float = 600.0
    memory: float = 4000.0
    pcie: float = 55.0
    nvlink: float = 300.0
    network: float = 50.0
    gpus: int = 8


@dataclass(frozen=True)
class Step:
    """Seconds of one step by what it is bound by, and GiB of weights per GPU."""

    ranks: int
    compute: float
    pcie: float
    nvlink: float
    network: float
    gib: float

    @property
    def floor(self) -> float:
        return max(self.compute, self.pcie, self.nvlink, self.network)

    @property
    def bound(self) -> str:
        return max(("compute", "pcie", "nvlink", "network"), key=lambda name: getattr(self, name))


def parameters(model: str) -> int:
    """Of an OPT shape by name, or a number such as 13e9."""
    if model in SHAPES:
        return parameter_count(model)
    try:
        return int(float(model))
    except (ValueError, OverflowError):
        raise UserError(f"--model: {model} is no number of parameters, and none of {', '.join(SHAPES)}") from None


def replicas(numel: int, tokens: int, ranks: int, streamed: bool, on: Machines, itemsize: int = 2) -> Step:
    """Each rank has all weights."""
    size, local = itemsize * numel, min(ranks, on.gpus)
    compute = 4 * numel * tokens / (on.tflops * 1e12) + 4 * size / (on.memory * 1e9)
    more = 2 / (SHARED_EVERY * local) if local > 1 else 0.0
    up = size * (1 + more) if streamed else 0.0
    return Step(ranks, compute, up / (on.pcie * 1e9), 0.0, 0.0, 0.0 if streamed else size / GIB)


def shards(numel: int, tokens: int, ranks: int, streamed: bool, on: Machines, itemsize: int = 2) -> Step:
    """Each rank keeps a part of them."""
    size, local = itemsize * numel, min(ranks, on.gpus)
    compute = 8 * numel * tokens / (on.tflops * 1e12) + 3 * size / (on.memory * 1e9)
    up = 2 * size / ranks if streamed else 0.0
    inside, outside = 3 * size * (local - 1) / local, 3 * size * max(0.0, 1 - on.gpus / ranks)
    rates = up / (on.pcie * 1e9), inside / (on.nvlink * 1e9), outside / (on.network * 1e9)
    return Step(ranks, compute, *rates, 0.0 if streamed else size / ranks / GIB)


def table(model: str, tokens: int, on: Machines) -> str:
    """Markdown: every method that several ranks can train, resident and streamed, on 1 to 64 GPUs."""
    numel, of = parameters(model), {"replicas": replicas, "shards": shards}
    lines = [
        f"{numel:,} parameters in 16 bits, {tokens:,} tokens per GPU and step; {on.tflops:g} TFLOP/s, GPU memory "
        f"{on.memory:g} GB/s, PCIe {on.pcie:g}, NVLink {on.nvlink:g}, network {on.network:g} GB/s per machine of "
        f"{on.gpus} GPUs. Floors by formula (docs/ranks.md), nothing is measured.",
        "",
        "| method | weights | GPUs | floor, s | bound by | compute | PCIe | NVLink | network | tok/s | GiB per GPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in METHODS.items():
        if row.ranks is None:
            continue
        for streamed in (False, True):
            for ranks in COUNTS:
                s = of[row.ranks](numel, tokens, ranks, streamed, on)
                times = " | ".join(f"{x:.3f}" for x in (s.compute, s.pcie, s.nvlink, s.network))
                where, rate = "streamed" if streamed else "resident", f"{ranks * tokens / s.floor:,.0f}"
                lines.append(
                    f"| {name} | {where} | {ranks} | {s.floor:.3f} | {s.bound} | {times} | {rate} | {s.gib:.1f} |"
                )
    return "\n".join(lines)
