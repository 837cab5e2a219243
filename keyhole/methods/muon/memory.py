"""The cost of a step of muon, and whether host memory has room for its state.

Host memory: 2 bytes per element of a matrix of a block and 4 per element of the rest (momentum, and two moments), or 4
and 8 with moments: float32; a table and a head are the rest. Link: the state up and down once per step. On the device:
the slots of the state's engine (every unit of a block, and one more for what comes next), and Newton-Schulz on the
largest matrix [m, n], m <= n: 18 bytes per element (the update in float32, three copies in bfloat16, momentum in
float32) and 4 m^2 for two products [m, m].

Work: Newton-Schulz has, per step and matrix, products of 2 m^2 n, 2 m^3 and 2 m^2 n operations.
"""

from collections import Counter
from dataclasses import replace

from keyhole.machine.rates import Rates
from keyhole.methods.lomo.adam_pages import Paging
from keyhole.methods.lomo.memory import step_work as lomo_work
from keyhole.methods.lomo.traits import LOMO
from keyhole.methods.muon.traits import MuonConfig
from keyhole.methods.work import reverse_bytes, update_launches
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.model.backward.memory import ReverseBytes
from keyhole.model.structure.layout import Layout

KERNELS = 12  # launches per tensor, beside three per step of Newton-Schulz
PER_ELEMENT, PER_SQUARE = 18, 4  # bytes of Newton-Schulz


def slot_count(layout: Layout) -> int:
    """A block's units are all in use until they are finished, and the next one comes meanwhile."""
    units = Counter(unit.block for unit in layout.of_kind("block") if unit.expert is None)
    return max(units.values(), default=1) + 1


PAGING = Paging("muon", MuonConfig, ("momentum_buffer",), slot_count)


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ReverseBytes:
    """The device peak of a step."""
    shapes = [tensor.shape[-2:] for tensor in layout.tensors if tensor.in_matrices]
    products = max((PER_ELEMENT * s.numel() + PER_SQUARE * min(s) ** 2 for s in shapes), default=0)
    return reverse_bytes(layout, streamed, work, room, updates=PAGING.on_device(layout, work, room) + products)


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step."""
    own = work.settings or MuonConfig()
    assert isinstance(own, MuonConfig)
    flops = 0.0
    for tensor in (tensor for tensor in layout.tensors if tensor.in_matrices and tensor.param.requires_grad):
        short, long = sorted(tensor.shape[-2:])
        count = tensor.shape.numel() / (short * long)
        flops += count * own.ns_steps * (4.0 * short**2 * long + 2.0 * short**3)
    found = lomo_work(layout, streamed, replace(work, method=LOMO.name, settings=own), room, rates)
    found = found.plus(launches=update_launches(layout, KERNELS + 3 * own.ns_steps))
    return found.plus(products=flops, **PAGING.work(layout, work, room))


FORMULAS = Formulas(device_bytes, step_work, PAGING.host_state)
