"""Bytes on the device of a zeroth-order step: those of its forward passes (model/forward/memory.py), with the perturbed
copies of the spine for every direction. And what a step asks of a machine, beside 2 q forward passes:

    touched    of a weight of w bytes at home, b in compute: the first direction reads and writes it (the update of the
               step before) and writes two copies, 2 w + 2 b; each further one reads it and writes two, w + 2 b
    down       what was streamed; of blocks an EVERY-th part, while the GPU waits for the link (write_back.py)

Noise costs arithmetic rather than bytes: counted as NOISE bytes per number drawn, which fits the steps of OPT-13B on an
H200 (benchmarks/zo_h200_2026-11-16.md).
"""

from keyhole.machine.rates import Rates
from keyhole.methods.base import Room, Workload
from keyhole.methods.memory import forward_bytes
from keyhole.methods.work import StepWork, forward_work, home_bytes, unpacked_bytes
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.forward.memory import ForwardBytes
from keyhole.model.structure.layout import Layout

NOISE = 1


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ForwardBytes:
    """The device peak of a step."""
    own: ZOConfig = work.settings or ZOConfig()
    return forward_bytes(layout, streamed, work, room, own.directions)


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """What a step asks of a machine."""
    from keyhole.methods.zo.write_back import EVERY, START

    own: ZOConfig = work.settings or ZOConfig()
    passes = forward_work(layout, streamed, work, room, rates)
    at_home = sum(unpacked_bytes(unit, room) for unit in layout.units)
    copies = 2 * room.formats.dtype.itemsize * layout.numel * own.directions
    noise = NOISE * layout.numel * 2 * own.directions  # of this step, and again for the update
    found = passes.plus(touched=(1 + own.directions) * at_home + copies + noise)
    home = home_bytes(layout, streamed, room)
    blocks = home_bytes(layout, (i for i in streamed if layout.units[i].kind == "block"), room)
    compute_s = found.products / rates.products_at(work.tokens, room.formats.dtype.itemsize)
    compute_s += found.touched / rates.device_memory
    link_s = rates.link_seconds(home, home)
    waits = rates.gpu_bytes is not None and link_s * (1 - START) > compute_s
    every = own.write_back_every or (EVERY if waits else 1)
    again = (every - 1) / 2 * (noise + 2 * at_home) * (blocks / max(1, at_home))  # updates that are made again
    return found.plus(down=home - blocks + blocks / every, touched=again)
