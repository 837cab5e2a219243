"""Bytes of adam-offload, and whether host memory has them.

On the device: a reverse sweep, what is on its way through the lane (lane.py), and masters that land. On the host, per
trained parameter (weights of b bytes):

    12      fp32 master and two moments
    b       of a resident unit: page-locked memory for its gradient on the way out and its weights on the way in
    0       of a streamed unit: its home, which host memory holds anyway, serves for both

so 12 + b in all, 14 in 16 bit, wherever the model lives.

A step: gradients go down (b per parameter), new weights come up (4 of a resident unit; a streamed one comes up with the
next forward). CPU and GPU share the updates, each taking the next one when it is free, so with c and g parameters per
second the GPU's share is g / (c + g), and g is what its lane moves over the link: 12 + b bytes up and 12 down, at LANE
of the rate that both ways have at once (7B on an H200: 86 % of the parameters in 1.98 s,
benchmarks/lsp_h200_2026-11-15_7B_d.md). Both go through host memory, 12 + b bytes read and 12 written, and its rate is
what bounds them there.
"""

from keyhole.errors import UserError
from keyhole.machine.host import host_memory, host_sum
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import GIB
from keyhole.methods.adam_offload.exchange import LANDING
from keyhole.methods.adam_offload.lane import SLOTS, chunk_of
from keyhole.methods.adam_offload.traits import AdamOffloadConfig
from keyhole.methods.base import Room, Workload
from keyhole.methods.memory import reverse_bytes
from keyhole.methods.work import StepWork, reverse_work
from keyhole.model.backward.memory import ReverseBytes
from keyhole.model.structure.layout import Layout
from keyhole.offload.shards import part_numel

LANE = 0.87
SLACK_BYTES = GIB  # of host memory: Python, PyTorch and the CUDA driver


def host_state_bytes(
    layout: Layout, streamed: set[int], element_bytes: int, cut: dict[int, tuple[int, int]] | None = None, of: int = 1
) -> int:
    """Host memory of adam-offload, without the homes of streamed units. cut: of units that ranks share out, the first
    element and the number of those that are here; of: ranks, which share out the state of tables too."""
    units = [u for u in layout.units if any(t.param.requires_grad for t in u.tensors)]
    here = {u.index: part_numel(u.numel, of) for u in layout.of_kind("table") if of > 1}
    here |= {unit: numel for unit, (_, numel) in (cut or {}).items()}
    return sum(here.get(u.index, u.numel) * (12 if u.index in streamed else 12 + element_bytes) for u in units)


def check_host_state(
    layout: Layout,
    streamed: set[int],
    element_bytes: int,
    loaded: bool = False,
    cut: dict[int, tuple[int, int]] | None = None,
    ranks: int = 1,
    of: int = 1,
) -> None:
    """UserError with what is missing when weights and state will not fit. loaded: the weights are there already; ranks:
    processes that will each take so much of this machine's memory."""
    state, here = host_state_bytes(layout, streamed, element_bytes, cut, of), cut or {}
    weights = element_bytes * sum(here.get(u.index, (0, u.numel))[1] for u in layout.units if u.index in streamed)
    needed, slack = ranks * (state + (0 if loaded else weights)), 0 if loaded else ranks * SLACK_BYTES
    available = host_memory().available_bytes
    if needed + slack > available:
        raise UserError(
            f"method: adam-offload keeps {12 + element_bytes} bytes per parameter in host memory: "
            f"{host_sum(needed, slack, available)}. Free memory, or use method=lomo, adalomo or zo, which keep no such "
            "state."
        )


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ReverseBytes:
    """The device peak of a step. The lane is counted always: whether the GPU helps with updates is seen later."""
    element_bytes = room.formats.dtype.itemsize
    lane = SLOTS * chunk_of(max(unit.numel for unit in layout.units)) * (12 + element_bytes)
    landing = 4 * LANDING if len(streamed) < len(layout.units) else 0
    return reverse_bytes(layout, streamed, work, room, updates=lane + landing)


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """What a step asks of a machine."""
    own: AdamOffloadConfig = work.settings or AdamOffloadConfig()
    b = room.formats.dtype.itemsize
    units = [u for u in layout.units if any(t.param.requires_grad for t in u.tensors)]
    numel = sum(u.numel for u in units)
    resident = sum(u.numel for u in units if u.index not in streamed)
    helped = rates.gpu_bytes is not None and own.schedule == "layerwise" and own.gpu_updates is not False
    lane = LANE * rates.both / (12 + b)
    share = lane / (lane + rates.adam) if helped else 0.0
    by_gpu = share * numel
    found = reverse_work(layout, streamed, work, room, rates)
    return found.plus(
        touched=2 * b * numel + 28 * by_gpu,
        up=((12 + b) * by_gpu + 4 * (1 - share) * resident) / (LANE if helped else 1.0),
        down=b * numel + (12 * by_gpu + b * share * (numel - resident)) / (LANE if helped else 1.0),
        adam=numel - by_gpu,
        through_host=(24 + b) * numel,
        host_bytes=host_state_bytes(layout, streamed, b),
        saved_bytes=12 * numel,
    )
