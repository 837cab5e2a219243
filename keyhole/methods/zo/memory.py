"""Device bytes of a zeroth-order step: those of its forward passes (model/forward/memory.py), with perturbed copies of
the spine for every pair of looks.

    mezo           2 q passes                           q pairs          all hidden states wait: 2 q m
    fzoo           q + 1 passes                         q // 2 + 1       (q + 1) m
    a search       3 passes, the rows in halves         2 pairs          3 m

for m micro-batches; a unit has two perturbed copies, whatever the estimator, because pairs are run one after the
other (in a recorded step, beside each other where there is room: work.py).

With low-rank directions (low_rank/) a pass carries the rows of all its looks at once, blocks have factors instead of
copies, and weights that are stored in another dtype than that of compute are converted as they arrive. Kept factors
grow with the run: they are counted as at its end, on the device and, in float32, on the host. Passes that look ahead
(zo.guide) count with their activations, if these are more than a step's.
"""

import math
from dataclasses import replace

from keyhole.methods.memory import forward_bytes
from keyhole.methods.workload import Room, Workload
from keyhole.methods.zo.low_rank.factors import room_for
from keyhole.methods.zo.low_rank.guide import KEPT_BYTES, MOST_POSITIONS, SOLVED_BYTES, tokens_per_pass
from keyhole.methods.zo.low_rank.parts import factor_sides
from keyhole.methods.zo.traits import DEFAULTS, ZOConfig
from keyhole.model.forward.graphs import SMALL_FLOP_WITH_FACTORS
from keyhole.model.forward.memory import ForwardBytes, activation_bytes, launched_as_graphs, recorded_numel
from keyhole.model.structure.layout import Layout

KEPT_PERIODS = 20  # assumed for a run of unknown length


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ForwardBytes:
    """The device peak of a step."""
    own = work.settings or ZOConfig()
    assert isinstance(own, ZOConfig)
    usual, q = DEFAULTS[own.estimator], own.count
    pairs = max(usual.pairs(q), 2 if work.searches else 0)
    if own.rank is not None:
        return _low_rank_bytes(layout, streamed, work, room, pairs, own)
    return forward_bytes(layout, streamed, work, room, pairs)


def _low_rank_bytes(
    layout: Layout, streamed: set[int], work: Workload, room: Room, pairs: int, own: ZOConfig
) -> ForwardBytes:
    usual, q = DEFAULTS[own.estimator], own.count
    looks = max(usual.passes(q), 3 if work.searches else 0)
    at_once = replace(work, tokens=work.tokens * looks, passes=-(-work.passes // looks))
    planned = forward_bytes(layout, streamed, at_once, room, pairs)
    b, formats = room.formats.dtype.itemsize, room.formats
    dense = max((u.numel for u in layout.units[1:] if u.kind != "block"), default=0)
    converted = formats.packs or formats.plain != formats.dtype
    block = max((u.numel for u in layout.of_kind("block")), default=0) if converted else 0
    copies = b * (2 * dense + 2 * pairs * layout.spine.numel + block)
    logits = forward_bytes(layout, streamed, work, room, pairs).logits  # the head is computed look by look
    graphs, tokens, hidden = 0, at_once.tokens, layout.table.shape[1]
    if own.fold and launched_as_graphs(layout, tokens, SMALL_FLOP_WITH_FACTORS):  # each block's input and output
        graphs = 2 * b * tokens * at_once.passes * hidden * layout.block_count
        if not launched_as_graphs(layout, tokens):  # and what `planned` contains only for smaller blocks
            graphs += b * recorded_numel(tokens, at_once.passes, hidden, layout.widest)
    perturbed = copies + factor_bytes(layout, own, pairs, b, work.steps) + graphs
    if own.guide is None:
        return replace(planned, perturbed=perturbed, logits=logits)
    ahead = guide_work(layout, work, own, b)  # before a step: its own copies are not in use, its graphs are
    moving = max(planned.activations, activation_bytes(layout, ahead.tokens, ahead.passes, b))
    return replace(planned, perturbed=perturbed + _guide_bytes(layout, work, own, b), activations=moving, logits=logits)


def guide_work(layout: Layout, work: Workload, own: ZOConfig, element_bytes: int) -> Workload:
    """The passes over the rows that V is found from (low_rank/guide.py)."""
    tokens = _guide_rows(work, own) * (work.length or work.tokens)
    at_once = min(tokens, max(work.tokens, tokens_per_pass(layout.widest, element_bytes)))
    return replace(work, tokens=at_once, passes=-(-tokens // at_once))


def _guide_rows(work: Workload, own: ZOConfig) -> int:
    """The number of rows that V is found from; no row is used twice."""
    assert own.guide is not None
    return own.guide if work.rows is None else min(own.guide, work.rows)


def _guide_positions(work: Workload, own: ZOConfig) -> int:
    """Positions whose errors are used. Unknown: a choice has one per row, and of other rows all tokens are trained."""
    rows, usual = _guide_rows(work, own), 1.0 if work.chooses else work.length or work.tokens
    count = math.ceil(rows * (usual if work.trained is None else work.trained))
    return count if work.chooses else min(count, MOST_POSITIONS)


def _guide_bytes(layout: Layout, work: Workload, own: ZOConfig, element_bytes: int) -> int:
    """The errors at the head, and the inputs of layers as far as they stay on the device, at all positions."""
    count = _guide_positions(work, own)
    units = [[t.shape[1] for t in unit.tensors if len(t.shape) == 2] for unit in layout.of_kind("block")]
    of_all = element_bytes * count * sum(map(sum, units))
    inputs = min(of_all, KEPT_BYTES)
    sides = [side for of_unit in units for side in of_unit]
    solved = max(4 * count * max(sides), min(SOLVED_BYTES, 4 * count * sum(sides)))
    return 4 * count * layout.table.shape[1] + inputs + solved


def factor_bytes(layout: Layout, own: ZOConfig, pairs: int, element_bytes: int, steps: int | None = None) -> int:
    """Bytes of factors, their looks, and a waiting fold, or all kept terms at the end of a run of `steps` steps."""
    assert own.rank is not None
    outputs, inputs, vectors = factor_sides(layout)
    factors, v = own.rank * outputs + vectors, own.rank * inputs
    now = 4 * factors * (1 + 2 * pairs) + element_bytes * v
    later = 4 * factors + element_bytes * v if own.fold else element_bytes * kept_terms(layout, own, steps)
    return now + later


def kept_terms(layout: Layout, own: ZOConfig, steps: int | None) -> int:
    """Numbers in the rooms of all kept terms at the end of a run (low_rank/factors.py)."""
    assert own.rank is not None
    periods = KEPT_PERIODS if steps is None else steps // own.refresh
    return room_for(own.rank * periods) * sum(factor_sides(layout)[:2])
