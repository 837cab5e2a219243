"""From the FLOPs and bytes of a step (methods/work.py) to seconds, and to what bounds the step.

    compute   max(products / (DUTY rate) + touched / device memory + kernels in a step's graph x NODE_S, launches)
    launches  the host's operations (methods/work.py) x the seconds of one that Python calls
    link      bytes up and down over the rates of the link (machine/rates.py)
    CPU       parameters that the CPU updates / its rate; bound by host memory where the link uses it too
    exposed   the same of updates that nothing hides: of `lsp` the embedding's, if its moments are in host memory,
              because its gradient is the last and its weights are used first; of adam-offload with schedule=monolithic
              all of them

The first three overlap, so a step takes about as long as the slowest. Overlapped work still costs a little: the first
units have nothing to overlap with, and copies take memory bandwidth from kernels. So the share HIDDEN of the overlapped
seconds is added, and UNIT_S for every streamed unit, which the host waits for, releases and sends on:

    step = max(parts) + HIDDEN (sum(parts) - max(parts) + min(busy, launches)) + UNIT_S x streamed units x sweeps
           + exposed

The host launches while the device is busy, but here and there the device waits for a small kernel: hence the last term
of the sum. Of plain autograd's launches AHEAD counts instead of HIDDEN, because each of its passes begins with an idle
device.

Slots. Copies are issued by the host too, as it goes through the units, and slots let it be only a few units ahead of
the link. Units differ in size and in their launches, so if both take about as long, each waits for the other at times;
if one is much faster, or if there are many slots, it is always ahead. A step through n slots takes at least

    (link^p + launches^p)^(1/p) + HIDDEN busy        p = max(2.7, n / 2)

which decides on short batches.

Two phases. A backward pass begins when the forward pass has ended, and slots hold only a few units, so neither can use
the other's idle link: compute and link are overlapped within each of the two, and the sum of both takes the place of
compute and link above,

    max(compute, link) of the forward pass + max(compute, link) of the backward pass

Updates of adam-offload overlap with the backward pass alone; its lane's copies are part of its updates, so they are not
counted as hidden once more (methods/adam_offload/memory.py).

Graphs. A whole step that is one CUDA graph costs the host nothing, but its small kernels do not fill the GPU, start and
drain: NODE_S for each.

What the constants were fitted to, on an H200 (files in benchmarks/records/):

    HIDDEN   streamed `zo`: link 0.457 s, compute 0.207 s, step 0.485 s (zo_h200_2026-11-16.md)
    AHEAD    `adamw` on OPT-1.3B took 7, 10, 11, 14, 19 and 20 ms longer than the device was busy, with 39, 46, 49, 48,
             65 and 58 ms of launches (plan_check_h200_2026-11-17_c.json to _h.json)
    DUTY     products of a step run at higher clocks than products alone, one after the other, as the rate is measured:
             in a profile of `lomo` on a Llama-3.5B they took 136 ms where that rate gives 150
    NODE_S   `zo` on OPT-1.3B with 512 tokens has some 580 kernels and takes 10.7 ms, of which products and bytes
             explain 8 (plan_check_h200_2026-11-17_e.json to _i.json)
    slots    streamed `lomo` on a Llama-3.5B with 512 tokens (5 slots; link 0.215 s, host 0.131, device 0.045) took
             0.257 s, and on a faster host (0.213, 0.104) 0.236; this gives 0.239 and 0.228. `zo` in 4 GiB (3 slots;
             0.065, 0.035) took 0.065 s; on a slower host, where it wrote back in every step, 0.099 (0.069, 0.061: 0.087
             planned) (plan_check_h200_2026-11-16_b.json, _c.json). `lora` on an 8B in 4 GiB (11 slots; 0.55, 0.29)
             took 0.567
    phases   `lomo` on Llama-7B in 4 GiB uploads for 0.22 s in its forward pass, which computes for 0.1, and computes
             for 0.37 s in its backward pass, which uploads for 0.24: 0.59 s, measured 0.574 (lomo_h200_2026-11-16.md);
             compiled 0.51 and 0.507
"""

from dataclasses import dataclass

from keyhole.machine.rates import Rates
from keyhole.methods.workload import StepWork

HIDDEN = 0.1
AHEAD = 0.28
DUTY = 1.06
UNIT_S = 20e-6
NODE_S = 4.5e-6


@dataclass(frozen=True)
class StepSeconds:
    """The parts of a step, and the whole."""

    compute: float
    link: float
    cpu: float
    units: float
    bound_by: str
    exposed: float = 0.0
    phases: float | None = None  # compute and link, overlapped within each phase; None: the step has one phase
    alone: float = 0.0  # the first phase, if updates do not overlap with it
    host: float = 0.0  # the hidden part of launches
    late: float = 0.0  # the least that copies issued by the host take

    @property
    def total(self) -> float:
        parts = (self.compute, self.link, self.cpu) if self.phases is None else (self.phases - self.alone, self.cpu)
        hidden = min(self.compute, self.cpu) if self.alone else sum(parts) - max(parts)
        step = self.alone + max(parts) + HIDDEN * (hidden + self.host)
        return max(step, self.late) + self.units + self.exposed


def step_seconds(work: StepWork, rates: Rates, *, rows: int, itemsize: int, units: int = 0) -> StepSeconds:
    """rows: tokens per pass; units: those that cross the link, counted once per sweep."""
    busy, launching = _device_seconds(work, rates, rows, itemsize)
    link = rates.link_seconds(work.up, work.down)
    unhidden = work.exposed_adam / work.adam if work.adam else 0.0
    updates = work.adam / rates.adam
    exposed = unhidden * updates + work.exposed_bytes * (1 / rates.up + 1 / rates.down)
    parts = {
        "compute": max(busy, launching),
        "link": link,
        "CPU": (1 - unhidden) * updates,
    }
    phases, alone = None, 0.0
    if work.begin is not None:
        first, launched = _device_seconds(work.begin, rates, rows, itemsize)
        before = rates.link_seconds(work.begin.up, work.begin.down)
        alone = max(first, launched, before)
        phases = alone + max(busy - first, launching - launched, link - before)
    host, power = min(busy, launching) * (AHEAD / HIDDEN if work.plain else 1.0), max(2.7, work.slots / 2)
    copied = (link**power + launching**power) ** (1 / power) + HIDDEN * busy if units else 0.0
    alone = alone if work.updates_in_reverse else 0.0
    bound = max(parts, key=lambda name: parts[name])
    if bound == "CPU" and work.updates_in_reverse and rates.gpu_bytes is not None:  # the link shares it
        bound = "memory"
    if bound == "compute" and launching > busy:
        bound = "CPU"
    return StepSeconds(
        compute=parts["compute"],
        link=link,
        cpu=parts["CPU"],
        units=units * UNIT_S,
        bound_by=bound,
        exposed=exposed,
        phases=phases,
        alone=alone,
        host=host,
        late=copied,
    )


def _device_seconds(work: StepWork, rates: Rates, rows: int, itemsize: int) -> tuple[float, float]:
    """(seconds that the device is busy, seconds that the host needs to launch)."""
    busy = work.products / (DUTY * rates.products_at(rows * work.together, itemsize))
    busy += work.touched / rates.device_memory + work.nodes * NODE_S
    launching = work.launches * rates.called
    if rates.gpu_bytes is None:  # on a CPU calls and compute do not overlap
        return busy + launching, 0.0
    return busy, launching
