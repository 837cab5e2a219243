"""From the FLOPs, bytes and launches of a step (methods/work.py) to seconds, and to what bounds the step.

    compute   products / rate + touched bytes / device memory + kernels in a step's graph x NODE_S
    launches  operations of the host x the seconds of one
    link      bytes up and down over the rates of the link (machine/rates.py)
    updates   parameters that the CPU updates / its rate, which host memory bounds
    exposed   the same of updates that nothing hides: of `lsp` the embedding's, if its moments are in host memory,
              because its gradient is the last and its weights are used first; of adam-offload with schedule=monolithic
              all of them

All but the last overlap, so a step takes about as long as the slowest. The first units have nothing to overlap with,
copies take memory bandwidth from kernels, and a pass waits for slots: the share HIDDEN of what is overlapped is added.

    step = slowest + HIDDEN (sum of the others) + exposed

Small kernels of a step that is one CUDA graph do not fill the GPU, start and drain: NODE_S for each. Products of a step
run at higher clocks than products alone, as the rate is measured: DUTY. With HIDDEN = 0.15 all 91 steps of models of 3B
and more that were recorded on H200s (benchmarks/records/) are within 20 %; smaller ones, where launches decide and
hosts differ, within 30 %, said as a factor of two.
"""

from dataclasses import dataclass

from keyhole.machine.rates import Rates
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
        return "seconds: within a factor of two, since launches decide in models below 3B"
    if rates.measured:
        return "seconds: within 20 %, from this machine's measured rates"
    return "seconds: within 25 %, from a data sheet"
