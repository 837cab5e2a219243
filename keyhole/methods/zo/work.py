"""What a step of zo asks of a machine, beside its forward passes (methods/work.py):

    touched    of a weight of w bytes at home, b in compute: with the update of the step before it is read and written;
               each pair of passes reads it and writes two copies, w + 2 b
    down       what was streamed; of blocks an EVERY-th part, while the GPU waits for the link (write_back.py)

Noise costs arithmetic rather than bytes: counted as NOISE bytes per number drawn, which fits the steps of OPT-13B on an
H200 (benchmarks/zo_h200_2026-11-16.md).
"""

from keyhole.machine.rates import Rates
from keyhole.methods.base import Room, Workload
from keyhole.methods.work import StepWork, forward_work, met_bytes, unpacked_bytes
from keyhole.methods.zo.traits import ZO, ZOConfig
from keyhole.model.structure.layout import Layout

NOISE = 1


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """What a step asks of a machine."""
    from keyhole.methods.zo.write_back import EVERY, START

    own: ZOConfig = work.settings or ZOConfig()
    pairs = -(-ZO.passes(own) // 2)
    found = forward_work(layout, streamed, work, room, rates)
    at_home = sum(unpacked_bytes(unit, room) for unit in layout.units)
    copies = 2 * room.formats.dtype.itemsize * layout.numel * pairs
    noise = NOISE * layout.numel * pairs
    found = found.plus(touched=(1 + pairs) * at_home + copies + 2 * noise)  # noise of this step, and of the update
    home = met_bytes(layout, streamed, work, room)
    blocks = met_bytes(layout, [i for i in streamed if layout.units[i].kind == "block"], work, room)
    compute_s = found.products / rates.products_at(work.tokens, room.formats.dtype.itemsize)
    compute_s += found.touched / rates.device_memory
    waits = rates.gpu_bytes is not None and rates.link_seconds(home, home) * (1 - START) > compute_s
    every = own.write_back_every or (EVERY if waits else 1)
    again = (every - 1) / 2 * (noise + 2 * at_home) * (blocks / max(1, at_home))  # updates that are made again
    return found.plus(down=home - blocks + blocks / every, touched=again)
