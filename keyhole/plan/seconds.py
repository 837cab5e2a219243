"""From the FLOPs, bytes and launches of a step (methods/work.py) to seconds, and to what bounds the step.

    compute   products / rate + touched bytes / device memory + kernels in a step's graph x NODE_S
    launches  operations of the host x the seconds of one
    link      bytes up and down over the rates of the link (machine/rates.py)
    updates   parameters that the CPU updates / its rate, which host memory bounds
    exposed   the same of updates that nothing hides: of `lsp` the embedding's, if its moments are in host memory,
              because its gradient is the last and its weights are used first

All but the last overlap, so a step takes about as long as the slowest. The first units have nothing to overlap with,
copies take memory bandwidth from kernels, and a pass waits for slots: the share HIDDEN of what is overlapped is added.

    step = slowest + HIDDEN (sum of the others) + exposed

Small kernels of a step that is one CUDA graph do not fill the GPU, start and drain: NODE_S for each. Products of a step
run at higher clocks than products alone, as the rate is measured: DUTY. With HIDDEN = 0.15 all 91 steps of models of 3B
and more that were recorded on H200s (benchmarks/records/) are within 20 %; smaller ones, where launches may decide and
hosts differ, within 30 %, said as a factor of two.

Common machines are known by name, for `keyhole plan --machine NAME`: estimates from data sheets.

A GPU is described by the rate of its matrix products with many rows, and by its memory bandwidth; with few rows a
product also waits for its weights, which are read once:

    rate(rows) = best / (1 + best b / (2 memory rows))        b = 2 bytes per weight

Products are estimated at 75 to 90 % of the data sheet's dense 16-bit rate with fp32 sums (on GeForce half of the
advertised rate), memory at 85 %, a link at 85 % of its nominal rate. The numbers of `h200` are those of the runs in
benchmarks/records/ (16 cores of a Xeon). All of them are estimates: another board, cooler or CPU gives other rates.
"""

from dataclasses import dataclass

from keyhole.errors import UserError
from keyhole.machine.rates import WORKSPACE_BYTES, WORKSPACE_BYTES_9, Rates
from keyhole.machine.sizes import GIB
from keyhole.methods.workload import StepWork

HIDDEN = 0.15
DUTY = 1.06
NODE_S = 4.5e-6
SMALL = 2.9e9  # parameters below which launches may decide


@dataclass(frozen=True)
class StepSeconds:
    """The parts of a step (compute: or launches, if they take longer), the whole, and what bounds it."""

    compute: float
    link: float
    cpu: float
    exposed: float
    total: float
    bound_by: str


def step_seconds(work: StepWork, rates: Rates, *, rows: int, itemsize: int) -> StepSeconds:
    """rows: tokens per pass."""
    busy = work.products / (DUTY * rates.products_at(rows * work.together, itemsize))
    busy += work.touched / rates.device_memory + work.nodes * NODE_S
    launches, link = work.launches * rates.called, rates.link_seconds(work.up, work.down)
    if rates.gpu_bytes is None:  # on a CPU calls and compute do not overlap
        busy, launches = busy + launches, 0.0
    hidden = 1 - work.exposed_adam / work.adam if work.adam else 1.0
    updates = work.adam / rates.adam
    exposed = (1 - hidden) * updates + work.exposed_bytes * (1 / rates.up + 1 / rates.down)
    parts = {"compute": busy, "CPU": launches, "link": link, "memory": hidden * updates}
    bound = max(parts, key=lambda name: parts[name])
    total = parts[bound] + HIDDEN * (sum(parts.values()) - parts[bound]) + exposed
    if bound == "memory" and rates.gpu_bytes is None:
        bound = "CPU"
    return StepSeconds(max(busy, launches), link, parts["memory"], exposed, total, bound)


def trust(rates: Rates, numel: int) -> str:
    """How near the seconds are, for the lines of a plan."""
    if numel < SMALL:
        return "seconds: within a factor of two: in models below 3B launches may decide"
    if rates.measured:
        return "seconds: within 20 %, from this machine's measured rates"
    return "seconds: within 25 %, from a data sheet"


# -- machines by name --------------------------------------------------------------------------------------------------

ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)
FP32_SHARE = {"laptop": 0.4, "3060": 0.5, "4080": 0.45, "4090": 0.45, "a10": 0.4}
FP32_SHARE |= {"a100": 0.07, "h100": 0.07, "h200": 0.07}


def _machine(
    name: str,
    title: str,
    *,
    gpu: int,
    ram: int,
    tflops: float,
    memory: float,
    link: float,
    host: float,
    adam: float,
    hopper: bool = False,
) -> Rates:
    """gpu, ram in GiB; tflops of 16-bit products; memory, link and host memory in GB/s; adam in G parameters/s."""
    best, bandwidth = tflops * 1e12, memory * 1e9
    return Rates(
        name=title,
        measured=False,
        gpu_bytes=gpu * GIB,
        host_bytes=ram * GIB,
        products={rows: best / (1 + best / (bandwidth * rows)) for rows in ROWS},
        products_fp32=best * FP32_SHARE[name],
        device_memory=bandwidth,
        up=link * 1e9,
        down=link * 1e9,
        both=0.87 * link * 1e9,
        host_memory=host * 1e9,
        adam=adam * 1e9,
        workspace_bytes=WORKSPACE_BYTES_9 if hopper else WORKSPACE_BYTES,
    )


def _all() -> dict[str, Rates]:
    small = {"host": 38.0, "adam": 1.2}
    machines = {
        "laptop": {"title": "laptop, RTX 4060 8 GB, PCIe 4 x8", "gpu": 8, "ram": 32, "tflops": 26.0, "memory": 220.0}
        | {"link": 12.5, **small},
        "3060": {"title": "RTX 3060 12 GB, PCIe 4 x16", "gpu": 12, "ram": 32, "tflops": 22.0, "memory": 310.0}
        | {"link": 25.0, **small},
        "4080": {"title": "RTX 4080 16 GB, PCIe 4 x16", "gpu": 16, "ram": 64, "tflops": 80.0, "memory": 610.0}
        | {"link": 25.0, "host": 60.0, "adam": 2.0},
        "4090": {"title": "RTX 4090 24 GB, PCIe 4 x16", "gpu": 24, "ram": 64, "tflops": 145.0, "memory": 860.0}
        | {"link": 25.0, "host": 60.0, "adam": 2.0},
        "a10": {"title": "A10 24 GB, PCIe 4 x16", "gpu": 24, "ram": 128, "tflops": 70.0, "memory": 510.0}
        | {"link": 25.0, "host": 85.0, "adam": 2.5},
        "a100": {"title": "A100 80 GB, PCIe 4 x16", "gpu": 80, "ram": 256, "tflops": 250.0, "memory": 1700.0}
        | {"link": 25.0, "host": 120.0, "adam": 3.5},
        "h100": {"title": "H100 80 GB, PCIe 5 x16", "gpu": 80, "ram": 256, "tflops": 640.0, "memory": 2850.0}
        | {"link": 55.0, "host": 150.0, "adam": 4.0, "hopper": True},
        "h200": {"title": "H200 141 GB, PCIe 5 x16", "gpu": 140, "ram": 128, "tflops": 740.0, "memory": 4000.0}
        | {"link": 55.0, "host": 85.0, "adam": 3.1, "hopper": True},
    }
    return {name: _machine(name, **about) for name, about in machines.items()}  # type: ignore[arg-type]


PROFILES: dict[str, Rates] = _all()


def profile(name: str) -> Rates:
    """The machine of this name; UserError lists the known names."""
    if name.lower() not in PROFILES:
        raise UserError(f"--machine: {name!r} is not one of {', '.join(PROFILES)}, or here")
    return PROFILES[name.lower()]


def profile_of(gpu: str) -> Rates | None:
    """The estimate for a GPU, by its CUDA name; None if there is none."""
    words = gpu.lower().replace("-", " ").split()
    return next((rates for name, rates in PROFILES.items() if name in words), None)
