"""Device bytes and work of a zeroth-order step, beside those of its forward passes (model/forward/memory.py,
methods/work.py), with perturbed copies of the common unit for every pair of looks.

    mezo           2 q passes                           q pairs          all hidden states wait: 2 q m
    fzoo           q + 1 passes                         q // 2 + 1       (q + 1) m

for m micro-batches; a unit has two perturbed copies, whatever the estimator, because pairs are run one after the
other. For a weight of w bytes at home, b in compute:

    touched    the update of the step before reads and writes it; each pair of passes reads it and writes two copies,
               w + 2 b; noise costs arithmetic rather than bytes, and counts as NOISE bytes per number drawn, which fits
               the steps of OPT-13B on an H200 (benchmarks/records/zo_h200_2026-11-16.md)
    down       streamed units; of blocks an EVERY-th part, while the GPU waits for the link (write_back.py)

On short batches, if all weights are resident and memory has room, a whole step is one CUDA graph (recorded_step.py).

With low-rank directions (low_rank/) a pass carries the rows of all its looks at once, so there are fewer launches;
blocks have factors instead of copies, and weights that are stored in another dtype than that of compute are converted
as they arrive. The product reads W, and once per period W comes up, is read, written and written back; beside each
product its input is read, and its output is written and read once more. (Blocks before the first trained weight run
with the rows of one look; a plan counts all.) Kept factors grow with the run: they are counted as at its end, on the
device and, in float32, on the host. A pass that looks ahead (zo.guide) counts with its activations, if these are more
than a step's.
"""

import math
from dataclasses import replace
from typing import cast

from keyhole.machine.rates import Rates
from keyhole.methods.work import forward_bytes, forward_work, home_bytes, met_bytes, unpacked_bytes
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.methods.zo.low_rank.factors import room_for
from keyhole.methods.zo.low_rank.guide import KEPT_BYTES, MOST_POSITIONS, tokens_per_pass
from keyhole.methods.zo.low_rank.parts import factor_sides
from keyhole.methods.zo.recorded_step import ROOM, is_short
from keyhole.methods.zo.traits import ZOConfig
from keyhole.methods.zo.write_back import EVERY, START
from keyhole.model.forward.blocks import SMALL_FLOP_WITH_FACTORS
from keyhole.model.forward.memory import (
    ALLOCATOR_SLACK,
    ForwardBytes,
    activation_bytes,
    launched_as_graphs,
    recorded_numel,
)
from keyhole.model.structure.layout import Layout

KEPT_PERIODS = 20  # assumed for a run of unknown length
NOISE = 1
KERNELS = 37  # of a block's forward pass, if they cannot be counted


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ForwardBytes:
    """The device peak of a step."""
    own, formats, b = cast(ZOConfig, work.settings or ZOConfig()), room.formats, room.formats.dtype.itemsize
    pairs, looks = own.usual.pairs(own.count), own.passes
    planned = forward_bytes(layout, streamed, work, room, pairs)
    if own.rank is None:
        unpacked = 4 * layout.largest_unit_numel if own.weight_decay and formats.packs else 0  # if it has vectors
        return replace(planned, perturbed=planned.perturbed + unpacked)
    at_once = replace(work, tokens=work.tokens * looks, passes=-(-work.passes // looks))
    logits = planned.logits  # the head is computed look by look
    planned = forward_bytes(layout, streamed, at_once, room, pairs)
    dense = max((u.numel for u in layout.units[1:] if u.kind != "block"), default=0)
    converted = formats.packs or formats.plain != formats.dtype
    block = max((u.numel for u in layout.of_kind("block")), default=0) if converted else 0
    perturbed = b * (2 * dense + 2 * pairs * layout.common.numel + block) + factor_bytes(
        layout, own, pairs, b, work.steps
    )
    tokens, hidden, activations = at_once.tokens, layout.table.shape[1], planned.activations
    if own.fold and launched_as_graphs(layout, tokens, SMALL_FLOP_WITH_FACTORS):  # each block's input and output
        perturbed += 2 * b * tokens * at_once.passes * hidden * layout.block_count
        if not launched_as_graphs(layout, tokens):  # and what `planned` contains only for smaller blocks
            perturbed += b * recorded_numel(tokens, at_once.passes, hidden, layout.widest)
    if own.guide is not None:  # before a step: its own copies are not in use, its graphs are
        ahead, held = _look_ahead(layout, work, own, b)
        perturbed += held
        activations = max(activations, activation_bytes(layout, ahead.tokens, ahead.passes, b))
    return replace(planned, perturbed=perturbed, activations=activations, logits=logits)


def factor_bytes(layout: Layout, own: ZOConfig, pairs: int, element_bytes: int, steps: int | None = None) -> int:
    """Bytes of factors, their looks, and a fold, or all kept terms at the end of a run of `steps` steps."""
    assert own.rank is not None
    outputs, inputs, vectors = factor_sides(layout)
    factors, v = own.rank * outputs + vectors, own.rank * inputs
    later = 4 * factors + element_bytes * v if own.fold else element_bytes * kept_terms(layout, own, steps)
    return 4 * factors * (1 + 2 * pairs) + element_bytes * v + later


def kept_terms(layout: Layout, own: ZOConfig, steps: int | None) -> int:
    """Numbers in the rooms of all kept terms at the end of a run (low_rank/factors.py)."""
    assert own.rank is not None
    periods = KEPT_PERIODS if steps is None else steps // own.refresh
    return room_for(own.rank * periods) * sum(factor_sides(layout)[:2])


def _look_ahead(layout: Layout, work: Workload, own: ZOConfig, element_bytes: int) -> tuple[Workload, int]:
    """The passes over the rows that V is found from (low_rank/guide.py), of which none is used twice, and the bytes of
    errors at the head and of inputs of layers. How many positions are trained may be unknown: a choice has one per row,
    and of other rows all tokens are."""
    assert own.guide is not None
    rows = own.guide if work.rows is None else min(own.guide, work.rows)
    length = work.length or work.tokens
    at_once = min(rows * length, max(work.tokens, tokens_per_pass(layout.widest, element_bytes)))
    ahead = replace(work, tokens=at_once, passes=-(-rows * length // at_once))
    usual = 1.0 if work.chooses else length
    count = math.ceil(rows * (usual if work.trained is None else work.trained))
    count = count if work.chooses else min(count, MOST_POSITIONS)
    sides = [t.shape[1] for unit in layout.of_kind("block") for t in unit.tensors if len(t.shape) == 2]
    inputs = min(element_bytes * count * sum(sides), KEPT_BYTES)
    return ahead, 4 * count * (layout.table.shape[1] + max(sides)) + inputs


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step."""
    own, b = cast(ZOConfig, work.settings or ZOConfig()), room.formats.dtype.itemsize
    pairs, found = -(-own.passes // 2), forward_work(layout, streamed, work, room, rates)
    dense = [unit for unit in layout.units if own.rank is None or unit.kind != "block"]
    numel, at_home = sum(unit.numel for unit in dense), sum(unpacked_bytes(unit, room) for unit in dense)
    noise = NOISE * numel * pairs  # of this step, and of the update
    found = found.plus(touched=(1 + pairs) * at_home + 2 * b * numel * pairs + 2 * noise)
    if own.rank is not None:
        return _low_rank_work(layout, streamed, work, room, rates, found)
    home = met_bytes(layout, streamed, work, room)
    blocks = met_bytes(layout, [i for i in streamed if layout.units[i].kind == "block"], work, room)
    compute_s = found.products / rates.products_at(work.tokens, b) + found.touched / rates.device_memory
    compute_s = max(compute_s, found.launches * rates.called)
    waits = rates.gpu_bytes is not None and rates.link_seconds(home, home) * (1 - START) > compute_s
    every = own.write_back_every or (EVERY if waits else 1)
    again = (every - 1) / 2 * (noise + 2 * at_home) * (blocks / max(1, at_home))  # recomputed updates
    found = found.plus(down=home - blocks + blocks / every, touched=again)
    if streamed or room.limit_bytes is None or rates.gpu_bytes is None or room.formats.codec:
        return found
    # As one graph, if it is captured: the host launches nothing per block; while it is captured, the device holds the
    # weights of before and after the step beside its own.
    planned = device_bytes(layout, streamed, work, room)
    left = room.limit_bytes - planned.total
    if not own.deferred_update or ROOM * planned.homes > left or not is_short(layout, work.tokens, own.passes, False):
        return found
    of_block = layout.counts.forward_kernels if layout.counts else KERNELS
    kept = int(2 * planned.homes * ALLOCATOR_SLACK)
    return replace(found, launches=0.0, nodes=work.passes * layout.block_count * of_block, kept_bytes=kept)


def _low_rank_work(
    layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates, found: StepWork
) -> StepWork:
    own, b = cast(ZOConfig, work.settings or ZOConfig()), room.formats.dtype.itemsize
    blocks = {u.index for u in layout.of_kind("block")}
    tensors = (t for u in layout.of_kind("block") for t in u.tensors if t.param.requires_grad)
    sides = [t.shape for t in tensors if len(t.shape) == 2]
    touched: float = work.passes * work.tokens * b * sum(2 * rows + columns for rows, columns in sides)
    folds = 1 / own.refresh if own.fold else 0.0
    touched += 2 * folds * sum(unpacked_bytes(layout.units[i], room) for i in blocks)
    folded, kept = folds * home_bytes(layout, streamed & blocks, room), 0
    if not own.fold:  # two FLOPs per number of the terms, half of which there are on average
        kept = kept_terms(layout, own, work.steps)
        found = found.plus(products=work.passes * work.tokens * kept)
    if own.guide is not None:
        ahead = forward_work(layout, streamed, _look_ahead(layout, work, own, b)[0], room, rates)
        share = {name: getattr(ahead, name) / own.refresh for name in ("products", "touched", "up")}
        found = found.plus(**share)
    found = replace(found, launches=found.launches / own.passes * 1.5, together=own.passes)
    down = home_bytes(layout, streamed - blocks, room) + folded
    return found.plus(touched=touched, up=folded, down=down, host_bytes=4 * kept, saved_bytes=4 * kept)


FORMULAS = Formulas(device_bytes, step_work)
