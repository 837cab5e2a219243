"""Bytes of adam-offload, and whether host memory has room for them.

On the device: a reverse sweep, the gradients of two blocks, one being computed and one waiting for the link
(offload/downlink.py; at most WAITING, 10 ms of a link of 55 GB/s), the buffers of the lane (exchange.py), and the
landing buffer for masters. On the host, per trained parameter (weights of b bytes):

    12      fp32 master and two moments
    b       for a resident unit: page-locked memory for its outgoing gradient and its incoming weights
    0       for a streamed unit: its home, which host memory holds anyway, serves for both

so 12 + b in all, 14 in 16 bit, wherever the model lives.

Per step gradients are copied D2H (b per parameter) and new weights H2D (4 for a resident unit; a streamed one is
uploaded in the next forward pass). CPU and GPU share the updates; each takes the next one when it is free. So with c
and g parameters per second the GPU's share is g / (c + g). Both are slower together than alone, because both go through
host memory, 12 + b bytes read and 12 written per parameter:

    g = LANE both / (12 + b)      the lane: 12 + b bytes H2D and 12 D2H, at this share of the bidirectional rate
    c = BESIDE_LANE adam          the CPU's own rate beside the lane; BESIDE_COPIES adam if the GPU updates nothing, and
                                  only gradients and weights are copied

LANE and BESIDE_LANE are medians of ten cases on an H200 (1.3B: g 2.1 to 2.6, c 0.9 to 2.1 G parameters/s). The sum,
which decides the time, is uncertain by 15 %, and no rate of host memory that was measured in the same run explains it.
Gradients come with the backward pass, and the next forward pass begins with the weights whose gradients came last:
updates overlap with the backward pass alone.
"""

from collections import Counter

from keyhole.machine.rates import Rates
from keyhole.machine.sizes import MIB
from keyhole.methods.adam_offload.exchange import LANDING, SLOTS, chunk_of
from keyhole.methods.adam_offload.traits import AdamOffloadConfig
from keyhole.methods.settings import MethodSettings
from keyhole.methods.work import reverse_bytes, reverse_work
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.model.backward.memory import ReverseBytes
from keyhole.model.structure.layout import Layout

LANE, BESIDE_LANE, BESIDE_COPIES = 0.67, 0.45, 0.5
WAITING = 512 * MIB


def host_state(
    layout: Layout,
    streamed: set[int],
    element_bytes: int,
    own: MethodSettings | None = None,
    cut: dict[int, tuple[int, int]] | None = None,
) -> tuple[str, int]:
    """What is kept in host memory beside the homes of streamed units, in words and bytes. cut: for sharded units, the
    first element and the number of elements of this rank."""
    units = [u for u in layout.units if any(t.param.requires_grad for t in u.tensors)]
    here = {unit: numel for unit, (_, numel) in (cut or {}).items()}
    found = sum(here.get(u.index, u.numel) * (12 if u.index in streamed else 12 + element_bytes) for u in units)
    return f"adam-offload keeps {12 + element_bytes} bytes per parameter", found


def waiting_bytes(layout: Layout, element_bytes: int) -> int:
    """Gradients that may wait on the device: those of two blocks, but at most WAITING; at least the largest one."""
    of_block = Counter[int]()
    for unit in layout.of_kind("block"):
        of_block[unit.block or 0] += unit.numel
    largest = max(t.matrix.numel() for t in layout.tensors if t.block is not None) if of_block else 0
    most = min(WAITING, 2 * element_bytes * max(of_block.values(), default=0))
    return max(most, element_bytes * largest)


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ReverseBytes:
    """The device peak of a step. It always includes the lane: whether the GPU updates is decided later."""
    element_bytes = room.formats.dtype.itemsize
    lane = SLOTS * chunk_of(max(unit.numel for unit in layout.units)) * (12 + element_bytes)
    landing = 4 * LANDING if len(streamed) < len(layout.units) else 0
    return reverse_bytes(layout, streamed, work, room, updates=lane + landing + waiting_bytes(layout, element_bytes))


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step."""
    own = work.settings or AdamOffloadConfig()
    assert isinstance(own, AdamOffloadConfig)
    b = room.formats.dtype.itemsize
    units = [u for u in layout.units if any(t.param.requires_grad for t in u.tensors)]
    numel = sum(u.numel for u in units)
    resident = sum(u.numel for u in units if u.index not in streamed)
    on_gpu = rates.gpu_bytes is not None
    helped = on_gpu and own.gpu_updates is not False
    lane = LANE * rates.both / (12 + b) if helped else 0.0
    beside = (BESIDE_LANE if helped else BESIDE_COPIES if on_gpu else 1.0) * rates.adam
    share = lane / (lane + beside)
    by_gpu = share * numel
    found = reverse_work(layout, streamed, work, room, rates, offers_compiled=False)
    return found.plus(
        touched=2 * b * numel + 28 * by_gpu,
        up=(12 + b) * by_gpu + 4 * (1 - share) * resident,
        down=b * numel + 12 * by_gpu + b * share * (numel - resident),
        adam=(numel - by_gpu) * rates.adam / beside,
        host_bytes=host_state(layout, streamed, b)[1],
        saved_bytes=12 * numel,
    )


FORMULAS = Formulas(device_bytes, step_work, host_state)
