"""Predicts a step on 1 to 64 GPUs: bytes over each link, and the longest time of all as a floor. Nothing is run.

P parameters of b bytes, W = b P; N ranks, K of them per machine; T tokens per micro-batch, one micro-batch per rank, so
that N ranks train on N times the tokens. Rates: F FLOP/s of products, M bytes/s of GPU memory, and bytes/s one way of
the link to host memory (PCIe), between GPUs of a machine (NVLink, or PCIe without it), and of a machine's network.

    replicas (each rank has all weights; forward passes, 2 per micro-batch)
        compute   4 P T / F + 4 W / M          products; one fused pass: W read, W written, 2 W of perturbed copies
        PCIe      streamed: W up                weights that K ranks share change every 8 steps: 2 W / (8 K) more
                  or W / K up, and over NVLink W (K - 1) / K from neighbours, if that is faster (offload/gather.py)
        network   a few bytes

    shards (each rank keeps 1 / N; forward, and a backward pass that recomputes blocks)
        compute   8 P T / F + 3 W / M          2 forward, 2 recomputed, 4 backward; the update reads and writes
        PCIe      streamed: 2 W / N up, W / N down
        NVLink    3 W (min(N, K) - 1) / min(N, K)     two all-gathers and one exchange of gradients
        network   3 W (1 - K / N) per machine, if N > K
      where 3 W is 2 W of weights and x W of gradients and updates: x is 1 (lomo, adalomo, adam-offload), 3 for update
      rules over whole tensors (a float32 sum is returned to all ranks), and 4 (d / width)^2 for lsp: compressed
      numbers. An optimizer on the host moves 3 W / N more over PCIe if weights are resident, W / N if they are
      streamed, and 26 bytes per parameter through host memory

    all-reduced gradients (baselines, lora: each rank has all weights; forward and backward)
        compute   6 P T / F + 3 W / M          NVLink, network: as for shards, 3 W of gradients and no weights
                                               (lora: almost none); PCIe, streamed: 2 W up

    floor = max of compute, of each link and of host memory: with perfect overlap the longest hides the shorter ones

The formulas ignore activations, the start of a step, and contention on links: they give a floor, not a prediction.
tests/ranks/test_gradients.py compares the bytes that ranks send with these; docs/ranks.md has times of one GPU.
"""

from dataclasses import dataclass

from keyhole.bench.shapes import SHAPES, parameter_count
from keyhole.errors import UserError
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.methods.traits import Traits

COUNTS = (1, 2, 4, 8, 16, 32, 64)
SHARED_EVERY = 8
BOUNDS = ("compute", "pcie", "nvlink", "network", "host")


@dataclass(frozen=True)
class Machines:
    """Rates of the hardware: TFLOP/s, and GB/s one way; host: host memory, read and write together."""

    tflops: float = 600.0
    memory: float = 4000.0
    pcie: float = 55.0
    nvlink: float = 300.0
    network: float = 50.0
    gpus: int = 8
    host: float = 200.0


@dataclass(frozen=True)
class Exchange:
    """What a method's ranks move besides weights. gradients: bytes per byte of weights; link, host: see
    Traits.through_host."""

    gradients: float = 1.0
    link: float = 0.0
    host: float = 0.0


PLAIN = Exchange()


@dataclass(frozen=True)
class Step:
    """Seconds of one step by resource, and GiB of weights per GPU."""

    ranks: int
    compute: float
    pcie: float
    nvlink: float
    network: float
    gib: float
    host: float = 0.0

    @property
    def floor(self) -> float:
        return float(max(getattr(self, name) for name in BOUNDS))

    @property
    def bound(self) -> str:
        return max(BOUNDS, key=lambda name: getattr(self, name))


def parameters(model: str) -> int:
    """The number of parameters of an OPT shape by name, or of a number such as 13e9."""
    if model in SHAPES:
        return parameter_count(model)
    try:
        count = int(float(model))
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise UserError(f"--model: {model} is no number of parameters, and none of {', '.join(SHAPES)}")
    return count


def replicas(numel: int, tokens: int, ranks: int, streamed: bool, on: Machines, itemsize: int = 2) -> Step:
    """Each rank has all weights."""
    size, local = itemsize * numel, min(ranks, on.gpus)
    compute = 4 * numel * tokens / (on.tflops * 1e12) + 4 * size / (on.memory * 1e9)
    more = 2 / (SHARED_EVERY * local) if local > 1 else 0.0
    if not streamed:
        return Step(ranks, compute, 0.0, 0.0, 0.0, size / GIB)
    whole_s, parts_s = (size * (share + more) / (on.pcie * 1e9) for share in (1.0, 1 / local))
    between_s, _ = _between(size, local, on)
    up = (whole_s, 0.0) if whole_s <= max(parts_s, between_s) else (parts_s, between_s)
    return Step(ranks, compute, *up, 0.0, 0.0)


def shards(
    numel: int, tokens: int, ranks: int, streamed: bool, on: Machines, itemsize: int = 2, moved: Exchange = PLAIN
) -> Step:
    """Each rank keeps a shard of the weights."""
    size, local = itemsize * numel, min(ranks, on.gpus)
    compute = 8 * numel * tokens / (on.tflops * 1e12) + 3 * size / (on.memory * 1e9)
    up = (2 + min(1.0, moved.link) if streamed else moved.link) * size / ranks
    host = moved.host * numel * local / ranks / (on.host * 1e9)
    between = _between(size * (2 + moved.gradients), ranks, on)
    return Step(ranks, compute, up / (on.pcie * 1e9), *between, 0.0 if streamed else size / ranks / GIB, host)


def added_up(
    numel: int, tokens: int, ranks: int, streamed: bool, on: Machines, moved: Exchange, itemsize: int = 2
) -> Step:
    """Each rank has all weights, and gets the sum of all gradients; streamed weights are uploaded twice, and never
    change."""
    size = itemsize * numel
    compute = 6 * numel * tokens / (on.tflops * 1e12) + 3 * size / (on.memory * 1e9)
    up, between = 2.0 * size if streamed else 0.0, _between(size * moved.gradients, ranks, on)
    return Step(ranks, compute, up / (on.pcie * 1e9), *between, 0.0 if streamed else size / GIB)


def _between(size: float, ranks: int, on: Machines) -> tuple[float, float]:
    """Seconds over NVLink and over the network, when all ranks together receive this many bytes."""
    local = min(ranks, on.gpus)
    inside, outside = size * (local - 1) / local, size * max(0.0, 1 - on.gpus / ranks)
    return inside / (on.nvlink * 1e9), outside / (on.network * 1e9)


def width(model: str) -> float:
    """The width of an OPT shape; for a number of parameters, that of a Llama."""
    return float(SHAPES[model][0]) if model in SHAPES else 4096 * (parameters(model) / 6.7e9) ** (1 / 3)


def step_of(row: Traits, model: str, tokens: int, ranks: int, streamed: bool, on: Machines) -> Step:
    """The step, by the way in which the method's ranks cooperate."""
    numel, moved = parameters(model), Exchange(row.settings().exchanged(width(model)), *row.through_host)
    if row.ranks == "replicas" and row.sweep != "forward":
        return added_up(numel, tokens, ranks, streamed, on, moved)
    if row.ranks == "replicas":
        return replicas(numel, tokens, ranks, streamed, on)
    return shards(numel, tokens, ranks, streamed, on, moved=moved)


def table(model: str, tokens: int, on: Machines) -> str:
    """Markdown: every method that several ranks can train, resident and streamed, on 1 to 64 GPUs."""
    numel = parameters(model)
    lines = [
        f"{numel:,} parameters in 16 bits, {tokens:,} tokens per GPU and step; {on.tflops:g} TFLOP/s, GPU memory "
        f"{on.memory:g} GB/s, PCIe {on.pcie:g}, NVLink {on.nvlink:g}, network {on.network:g} and host memory "
        f"{on.host:g} GB/s per machine of {on.gpus} GPUs. Floors by formula (docs/ranks.md), nothing is measured.",
        "",
        "| method | weights | GPUs | floor | bound by | compute | PCIe | NVLink | network | host | tok/s | GiB each |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in METHODS.items():
        if row.ranks is None:
            continue
        for streamed in (False, True) if row.streams else (False,):
            for ranks in COUNTS:
                s = step_of(row, model, tokens, ranks, streamed, on)
                times = " | ".join(f"{getattr(s, name):.3f}" for name in BOUNDS)
                where, rate = "streamed" if streamed else "resident", f"{ranks * tokens / s.floor:,.0f}"
                lines.append(
                    f"| {name} | {where} | {ranks} | {s.floor:.3f} | {s.bound} | {times} | {rate} | {s.gib:.1f} |"
                )
    return "\n".join(lines)
