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
BYTES = 2  # of a weight


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

    def compute_s(self, flop: float, moved_bytes: float) -> float:
        return flop / (self.tflops * 1e12) + moved_bytes / (self.memory * 1e9)

    def between(self, size: float, ranks: int) -> dict[str, float]:
        """Seconds over NVLink and over the network, when all ranks together receive this many bytes."""
        local = min(ranks, self.gpus)
        inside, outside = size * (local - 1) / local, size * max(0.0, 1 - self.gpus / ranks)
        return {"nvlink": inside / (self.nvlink * 1e9), "network": outside / (self.network * 1e9)}


@dataclass(frozen=True)
class Step:
    """Seconds of one step by resource, and GiB of weights per GPU."""

    ranks: int
    gib: float
    seconds: dict[str, float]  # compute, pcie, nvlink, network, host

    @property
    def floor(self) -> float:
        return max(self.seconds.values())

    @property
    def bound(self) -> str:
        return max(self.seconds, key=self.seconds.__getitem__)


def step(ranks: int, gib: float, compute: float, pcie: float = 0.0, host: float = 0.0, **links: float) -> Step:
    links = {"nvlink": 0.0, "network": 0.0} | links
    return Step(ranks, gib, {"compute": compute, "pcie": pcie, **links, "host": host})


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


def replicas(numel: int, tokens: int, ranks: int, streamed: bool, on: Machines) -> Step:
    """Each rank has all weights, and runs forward passes."""
    size, local = BYTES * numel, min(ranks, on.gpus)
    compute = on.compute_s(4 * numel * tokens, 4 * size)
    if not streamed:
        return step(ranks, size / GIB, compute)
    more = 2 / (SHARED_EVERY * local) if local > 1 else 0.0
    whole_s, parts_s = (size * (share + more) / (on.pcie * 1e9) for share in (1.0, 1 / local))
    between_s = on.between(size, local)["nvlink"]
    if whole_s <= max(parts_s, between_s):
        return step(ranks, 0.0, compute, whole_s)
    return step(ranks, 0.0, compute, parts_s, nvlink=between_s)


def added_up(numel: int, tokens: int, ranks: int, streamed: bool, on: Machines, gradients: float) -> Step:
    """Each rank has all weights, and gets the sum of all gradients; streamed weights are uploaded twice, and never
    change. gradients: bytes per byte of weights."""
    size = BYTES * numel
    compute, up = on.compute_s(6 * numel * tokens, 3 * size), 2.0 * size if streamed else 0.0
    links = on.between(size * gradients, ranks)
    return step(ranks, 0.0 if streamed else size / GIB, compute, up / (on.pcie * 1e9), **links)


def shards(
    numel: int,
    tokens: int,
    ranks: int,
    streamed: bool,
    on: Machines,
    gradients: float = 1.0,
    through_host: tuple[float, float] = (0.0, 0.0),
) -> Step:
    """Each rank keeps a shard of the weights. through_host: see Traits."""
    size, local, (link, host) = BYTES * numel, min(ranks, on.gpus), through_host
    compute = on.compute_s(8 * numel * tokens, 3 * size)
    up = (2 + min(1.0, link) if streamed else link) * size / ranks
    host_s = host * numel * local / ranks / (on.host * 1e9)
    links = on.between(size * (2 + gradients), ranks)
    return step(ranks, 0.0 if streamed else size / ranks / GIB, compute, up / (on.pcie * 1e9), host_s, **links)


def width(model: str) -> float:
    """The width of an OPT shape; for a number of parameters, that of a Llama."""
    return float(SHAPES[model][0]) if model in SHAPES else 4096 * (parameters(model) / 6.7e9) ** (1 / 3)


def step_of(row: Traits, model: str, tokens: int, ranks: int, streamed: bool, on: Machines) -> Step:
    """The step, by the way in which the method's ranks cooperate."""
    numel, gradients = parameters(model), row.settings().exchanged(width(model))
    if row.ranks == "replicas" and row.sweep == "forward":
        return replicas(numel, tokens, ranks, streamed, on)
    if row.ranks == "replicas":
        return added_up(numel, tokens, ranks, streamed, on, gradients)
    return shards(numel, tokens, ranks, streamed, on, gradients, row.through_host)


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
        for where in (("resident", "streamed") if row.streams else ("resident",)) if row.ranks else ():
            for ranks in COUNTS:
                s = step_of(row, model, tokens, ranks, where == "streamed", on)
                times = " | ".join(f"{seconds:.3f}" for seconds in s.seconds.values())
                cells = f"{s.floor:.3f} | {s.bound} | {times} | {ranks * tokens / s.floor:,.0f} | {s.gib:.1f}"
                lines.append(f"| {name} | {where} | {ranks} | {cells} |")
    return "\n".join(lines)
