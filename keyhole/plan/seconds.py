"""From the FLOPs and bytes of a step (methods/work.py) to seconds, and to what bounds the step.

    compute   max(products / rate + touched / device memory, kernels x launch)
    link      bytes up and down over the rates of the link (machine/rates.py)
    CPU       max(parameters that the CPU updates / its rate, bytes of updates / host memory)
    exposed   the same of updates that nothing hides: of `lsp` the embedding's, if its moments are in host memory,
              because its gradient is the last and its weights are used first; of adam-offload with schedule=monolithic
              all of them

The first three overlap, so a step takes about as long as the slowest. Overlapped work still costs a little: the first
units have nothing to overlap with, and copies take memory bandwidth from kernels. So the share HIDDEN of the overlapped
seconds is added, and UNIT_S for every streamed unit, which the host waits for, releases and sends on:

    step = max(parts) + HIDDEN (sum(parts) - max(parts)) + UNIT_S x streamed units x sweeps + exposed

HIDDEN = 0.1 fits streamed `zo` (link 0.457 s, compute 0.207 s, step 0.485 s) on an H200
(benchmarks/zo_h200_2026-11-16.md).

A backward pass begins when the forward pass has ended, and slots hold only a few units, so neither can use the other's
idle link: compute and link are overlapped within each of the two, and the sum of both takes the place of compute and
link above,

    max(compute, link) of the forward pass + max(compute, link) of the backward pass

`lomo` on Llama-7B in 4 GiB uploads for 0.22 s in its forward pass, which computes for 0.1, and computes for 0.37 s in
its backward pass, which uploads for 0.24: 0.59 s, measured 0.574 (benchmarks/lomo_h200_2026-11-16.md); compiled 0.51
and 0.507.
"""

from dataclasses import dataclass

from keyhole.machine.rates import Rates
from keyhole.methods.work import StepWork

HIDDEN = 0.1
UNIT_S = 20e-6


@dataclass(frozen=True)
class StepSeconds:
    """The parts of a step, and the whole. phases: compute and link, overlapped within the forward and the backward
    pass; None for a step of one phase."""

    compute: float
    link: float
    cpu: float
    units: float
    bound_by: str
    exposed: float = 0.0
    phases: float | None = None

    @property
    def total(self) -> float:
        parts = (self.compute, self.link, self.cpu) if self.phases is None else (self.phases, self.cpu)
        return max(parts) + HIDDEN * (sum(parts) - max(parts)) + self.units + self.exposed


def step_seconds(work: StepWork, rates: Rates, *, rows: int, itemsize: int, units: int = 0) -> StepSeconds:
    """rows: tokens per pass; units: those that cross the link, counted once per sweep."""
    busy, launching = _device_seconds(work, rates, rows, itemsize)
    link = rates.link_seconds(work.up, work.down)
    late = work.exposed_adam / work.adam if work.adam else 0.0
    arithmetic, traffic = work.adam / rates.adam, work.through_host / rates.host_memory
    exposed = late * max(arithmetic, traffic) + work.exposed_bytes * (1 / rates.up + 1 / rates.down)
    arithmetic, traffic = (1 - late) * arithmetic, (1 - late) * traffic
    parts = {
        "compute": max(busy, launching),
        "link": link,
        "CPU": max(arithmetic, traffic),
    }
    phases = None
    if work.begin is not None:
        first, launched = _device_seconds(work.begin, rates, rows, itemsize)
        before = rates.link_seconds(work.begin.up, work.begin.down)
        phases = max(first, launched, before) + max(busy - first, launching - launched, link - before)
    bound = max(parts, key=lambda name: parts[name])
    if bound == "CPU" and traffic > arithmetic:
        bound = "memory"
    if bound == "compute" and launching > busy:
        bound = "CPU"
    return StepSeconds(parts["compute"], link, parts["CPU"], units * UNIT_S, bound, exposed, phases)


def _device_seconds(work: StepWork, rates: Rates, rows: int, itemsize: int) -> tuple[float, float]:
    """(seconds that the device is busy, seconds that the host needs to launch)."""
    busy = work.products / rates.products_at(rows * work.together, itemsize) + work.touched / rates.device_memory
    launching = work.kernels * rates.launch
    if rates.gpu_bytes is None:  # on a CPU calls and compute do not overlap
        return busy + launching, 0.0
    return busy, launching
