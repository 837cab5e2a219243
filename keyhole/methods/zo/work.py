"""The cost of a step of zo, beside its forward passes (methods/work.py):

    touched    for a weight of w bytes at home, b in compute: the update of the step before reads and writes it; each
               pair of passes reads it and writes two copies, w + 2 b
    down       streamed units; of blocks an EVERY-th part, while the GPU waits for the link (write_back.py)

On short batches, if all weights are resident and memory has room, a whole step is one CUDA graph (recorded_step.py).

With low-rank directions (low_rank/) blocks have no copies: the product reads W, and once per period W is read, written
and written back. Beside each product its input is read, and its output is written and read once more; a pass carries
the rows of all its looks, so there are fewer launches. (Blocks before the first trained weight run with the rows of one
look; a plan counts all.)

Noise costs arithmetic rather than bytes: it is counted as NOISE bytes per number drawn, which fits the steps of OPT-13B
on an H200 (benchmarks/records/zo_h200_2026-11-16.md).
"""

from dataclasses import replace

from keyhole.machine.rates import Rates
from keyhole.methods.work import forward_work, home_bytes, met_bytes, unpacked_bytes
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.methods.zo.memory import device_bytes, guide_work, kept_terms
from keyhole.methods.zo.recorded_step import ROOM, SHARE, is_short
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.forward.memory import ALLOCATOR_SLACK
from keyhole.model.structure.layout import Layout

NOISE = 1
KERNELS = 37  # of a block's forward pass, if they cannot be counted


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step."""
    from keyhole.methods.zo.write_back import EVERY, START

    own = work.settings or ZOConfig()
    assert isinstance(own, ZOConfig)
    if own.rank is not None:
        return _low_rank_work(layout, streamed, work, room, rates, own)
    pairs = -(-own.passes // 2)
    found = forward_work(layout, streamed, work, room, rates)
    at_home = sum(unpacked_bytes(unit, room) for unit in layout.units)
    copies = 2 * room.formats.dtype.itemsize * layout.numel * pairs
    noise = NOISE * layout.numel * pairs
    found = found.plus(touched=(1 + pairs) * at_home + copies + 2 * noise)  # noise of this step, and of the update
    home = met_bytes(layout, streamed, work, room)
    blocks = met_bytes(layout, [i for i in streamed if layout.units[i].kind == "block"], work, room)
    compute_s = found.products / rates.products_at(work.tokens, room.formats.dtype.itemsize)
    compute_s += found.touched / rates.device_memory
    compute_s = max(compute_s, found.launches * rates.called)
    waits = rates.gpu_bytes is not None and rates.link_seconds(home, home) * (1 - START) > compute_s
    every = own.write_back_every or (EVERY if waits else 1)
    again = (every - 1) / 2 * (noise + 2 * at_home) * (blocks / max(1, at_home))  # recomputed updates
    found = found.plus(down=home - blocks + blocks / every, touched=again)
    return _as_one_graph(found, layout, streamed, work, room, rates)


def _as_one_graph(
    found: StepWork, layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates
) -> StepWork:
    """The same with the whole step as one CUDA graph, if it is captured (recorded_step.py): the host launches nothing
    per block; while it is captured, the device holds the weights of before and after the step beside its own. Pairs of
    looks that run beside each other have copies of a unit of their own."""
    if streamed or room.limit_bytes is None or rates.gpu_bytes is None or room.formats.codec:
        return found
    own = work.settings or ZOConfig()
    assert isinstance(own, ZOConfig)
    planned = device_bytes(layout, streamed, work, room)
    has_room = ROOM * planned.homes <= room.limit_bytes - planned.total
    asked = own.deferred_update
    if not (asked and has_room and is_short(layout, work.tokens, own.passes, own.rank is not None)):
        return found
    of_block = layout.counts.forward_kernels if layout.counts else KERNELS
    nodes, kept = work.passes * layout.block_count * of_block, int(2 * planned.homes * ALLOCATOR_SLACK)
    largest = room.formats.dtype.itemsize * max((unit.numel for unit in layout.units[1:]), default=0)
    copies = 2 * largest * (-(-own.passes // 2) - 1)
    kept += copies if copies <= SHARE * (room.limit_bytes - planned.total) else 0
    return replace(found, launches=0.0, nodes=nodes, kept_bytes=kept)


def _low_rank_work(
    layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates, own: ZOConfig
) -> StepWork:
    b, looks = room.formats.dtype.itemsize, own.passes
    pairs, found = -(-looks // 2), forward_work(layout, streamed, work, room, rates)
    dense = [unit for unit in layout.units if unit.kind != "block"]
    numel, at_home = sum(u.numel for u in dense), sum(unpacked_bytes(u, room) for u in dense)
    touched: float = (1 + pairs) * at_home + 2 * b * numel * pairs + 2 * NOISE * numel * pairs
    tensors = (t for u in layout.of_kind("block") for t in u.tensors if t.param.requires_grad)
    sides = [t.shape for t in tensors if len(t.shape) == 2]
    touched += work.passes * work.tokens * b * sum(2 * rows + columns for rows, columns in sides)
    blocks = [unit.index for unit in layout.of_kind("block")]
    folds = 1 / own.refresh if own.fold else 0.0
    touched += 2 * folds * sum(unpacked_bytes(layout.units[i], room) for i in blocks)
    down = home_bytes(layout, streamed - set(blocks), room) + folds * home_bytes(layout, streamed & set(blocks), room)
    kept = 0 if own.fold else kept_terms(layout, own, work.steps)
    found = found.plus(products=work.passes * work.tokens * kept)  # two FLOPs per number, half of them on average
    if own.guide is not None:
        ahead = forward_work(layout, streamed, guide_work(layout, work, own, b), room, rates)
        share = {name: getattr(ahead, name) / own.refresh for name in ("products", "touched", "up")}
        found = found.plus(**share)
    found = replace(found, launches=found.launches / looks * 1.5, together=looks)
    return found.plus(touched=touched, down=down, host_bytes=4 * kept, saved_bytes=4 * kept)


FORMULAS = Formulas(device_bytes, step_work)
