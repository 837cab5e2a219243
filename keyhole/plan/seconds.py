"""From what a step asks of a machine (methods/work.py) to seconds, and what bounds them.

    compute   max(products / rate + touched / device memory, kernels x launch)
    link      bytes up and down over the rates of the link (machine/rates.py)
    CPU       max(parameters that the CPU updates / its rate, bytes of updates / host memory)

The three overlap, so a step takes as long as the slowest. What is hidden costs a little all the same: the first units
have nothing to hide behind, and copies take memory from kernels. HIDDEN of the hidden seconds is added, and UNIT_S for
every unit that is streamed, which is waited for, released and sent on by the host:

    step = max(parts) + HIDDEN (sum(parts) - max(parts)) + UNIT_S x streamed units x sweeps

HIDDEN = 0.1 fits streamed `zo` (link 0.457 s, compute 0.207 s, step 0.485 s) and `lomo` (0.50, 0.37, 0.525 s) on an
H200 (benchmarks/zo_h200_2026-11-16.md, benchmarks/lomo_h200_2026-11-16.md).
"""

from dataclasses import dataclass

from keyhole.machine.rates import Rates
from keyhole.methods.work import StepWork

HIDDEN = 0.1
UNIT_S = 20e-6


@dataclass(frozen=True)
class StepSeconds:
    """The parts of a step, and the whole."""

    compute: float
    link: float
    cpu: float
    units: float
    bound_by: str

    @property
    def total(self) -> float:
        parts = (self.compute, self.link, self.cpu)
        return max(parts) + HIDDEN * (sum(parts) - max(parts)) + self.units


def step_seconds(work: StepWork, rates: Rates, *, rows: int, itemsize: int, units: int = 0) -> StepSeconds:
    """rows: tokens per pass; units: that cross the link, counted once per sweep."""
    busy = work.products / rates.products_at(rows * work.together, itemsize) + work.touched / rates.device_memory
    launching = work.kernels * rates.launch
    if rates.gpu_bytes is None:  # a CPU computes nothing while it calls
        busy, launching = busy + launching, 0.0
    link = rates.link_seconds(work.up, work.down)
    arithmetic, traffic = work.adam / rates.adam, work.through_host / rates.host_memory
    parts = {
        "compute": max(busy, launching),
        "link": link,
        "CPU": max(arithmetic, traffic),
    }
    bound = max(parts, key=lambda name: parts[name])
    if bound == "CPU" and traffic > arithmetic:
        bound = "memory"
    if bound == "compute" and launching > busy:
        bound = "CPU"
    return StepSeconds(parts["compute"], link, parts["CPU"], units * UNIT_S, bound)
