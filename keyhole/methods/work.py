"""The cost of one step: memory, FLOPs, bytes and launches, as functions of shapes. plan/seconds.py turns them into
seconds.

For N parameters that a token uses (of experts, those it is routed to), M tokens per pass, b bytes per element:

    products     2 N M per forward pass; a backward pass has two more products per matrix, and recomputes each block if
                 only block inputs were kept: 8 N M per micro-batch. Attention: 2 T M H per block and pass (half of the
                 scores are masked), and in the backward pass the same multiples as other products.
    touched      bytes of elementwise kernels: activations (below), and the method's own kernels on weights
    up, down     bytes over the link: a streamed unit is uploaded once per sweep, and written back once per step; expert
                 units only if some token of the step uses them: if each chooses a share p, (1 - p)^M are not used
    launches     of the host, in operations of a forward pass that Python calls (machine/rates.py): constants per block
                 and pass, as a block of Llama or OPT has them, fewer if it runs as CUDA graphs; UPDATE per tensor that
                 our kernels update; EXPERT per expert that a pass uses; UNIT per unit in lockstep. They decide on short
                 batches and on models below 3B.
    nodes        kernels of a step that is one CUDA graph

The bytes of the elementwise kernels of an eager block are counted (model/structure/block_counts.py). These kernels take
SLOWER times as long as copies of the same bytes: a profile of `zo` on a Llama-3.5B, 2 x 4 x 1024 tokens on an H200, has
39 ms of them for 83 GB, of which 10 multiply strided halves for the rotary embedding. A backward pass takes TWICE
as long for them as a forward pass (twice the bytes, and sums over tokens): `lomo` there has 81 ms, with two
forward passes. Both constants are a compromise with OPT, which has no such halves. torch.compile fuses all but COMPILED
of them (benchmarks/records/lsp_h200_2026-11-15_7B_c.md). A block that cannot be counted is taken for one of Llama:
FORWARD_H tensors of the hidden width and FORWARD_W of the widest matrix side.

The numbers per method are in memory.py of its folder, beside its bytes; this file has the shared ones.
"""

from collections.abc import Iterable
from typing import Any

from keyhole.errors import UserError
from keyhole.machine.host import host_memory, host_sum
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import GIB
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.model.backward import memory as backward
from keyhole.model.backward.kept_blocks import SHARE as KEPT
from keyhole.model.backward.memory import HIDDEN, WIDE, slot_count
from keyhole.model.forward import memory as forward
from keyhole.model.forward.memory import launched_as_graphs
from keyhole.model.structure.layout import Layout, Unit
from keyhole.model.weights.format import PACKED

FORWARD_H, FORWARD_W = 51, 9
FORWARD, UNRECORDED, BACKWARD = 26, 24, 66  # launches of a block's pass: with autograd's record, in lockstep, backwards
HANDED, TENSORS = 120, 9  # of a block's gradients, handed over as they are complete, or under plain autograd
GRAPH, EXPERT = (8, 54), (10, 23)  # forward, backward
UPDATE, UNIT, STEP, PLAIN_STEP = 8, 14, 200, 140
SLOWER, TWICE = 1.4, 2.9
COMPILED = 0.25
COMPILED_KERNELS = 0.3
KEPT_GRAPH = 0.53  # the share of a block's activations that its graph keeps: `lora` (past_the_link_h200_2026-11-16)


# What a compiled block keeps, of what autograd saves: the compiler recomputes elementwise operations. Llama-7B, 4,096
# tokens: 16.0 of 23.1 GiB (`keyhole bench lomo --only kept`, one H200)
COMPILED_KEEPS = 0.7
SLACK_BYTES = GIB  # host memory for Python, PyTorch and the CUDA driver


def forward_bytes(
    layout: Layout, streamed: set[int], work: Workload, room: Room, directions: int = 1
) -> forward.ForwardBytes:
    """Forward passes in lockstep: zeroth-order, evaluation, generation. (Baselines count as if they did this: only
    their weights are planned.)"""
    sizes = {"tokens": work.tokens, "passes": work.passes, "directions": directions}
    return forward.forward_bytes(layout, streamed, formats=room.formats, workspace_bytes=room.workspace_bytes, **sizes)


def reverse_bytes(
    layout: Layout, streamed: set[int], work: Workload, room: Room, updates: int = 0
) -> backward.ReverseBytes:
    """Forward and backward pass, block by block; updates: bytes that the method adds."""
    own = work.settings
    how, compiled = (None, False) if own is None else (own.keeps, own.is_compiled)
    keeps = (COMPILED_KEEPS if compiled else 1.0) if how == "none" else 0.0
    return backward.reverse_bytes(
        layout,
        streamed,
        tokens=work.tokens,
        passes=work.passes,
        on_host=how == "host",
        keeps=keeps,
        compiled=compiled,
        parks=work.parks,
        updates=updates,
        formats=room.formats,
        workspace_bytes=room.workspace_bytes,
    )


def check_host_memory(keeps: str, state_bytes: int, weights_bytes: int | None = None, ranks: int = 1) -> None:
    """UserError with the missing amount if state and weights do not fit. keeps: the state, in words; weights_bytes: of
    all ranks on this machine (None: they are loaded already); ranks: those that each take so much for the state."""
    needed = ranks * state_bytes + (weights_bytes or 0)
    slack, available = 0 if weights_bytes is None else ranks * SLACK_BYTES, host_memory().available_bytes
    if needed + slack > available:
        raise UserError(
            f"method: {keeps} in host memory: {host_sum(needed, slack, available)}. Free memory, or use method=lomo, "
            "adalomo or zo, which keep no such state."
        )


def trained_numel(layout: Layout) -> int:
    """Elements of all tensors that are trained."""
    return sum(t.shape.numel() for t in layout.tensors if t.param.requires_grad)


def home_bytes(layout: Layout, units: Iterable[int], room: Room) -> int:
    return sum(map(room.formats.homes(layout).__getitem__, units))


def met_bytes(layout: Layout, units: Iterable[int], work: Workload, room: Room) -> float:
    """Home bytes of units; of expert units, only those that some token of the step uses."""
    experts = [i for i in units if layout.units[i].expert is not None]
    others = home_bytes(layout, set(units) - set(experts), room)
    return others + met_share(work, work.passes) * home_bytes(layout, experts, room)


def met_share(work: Workload, passes: int = 1) -> float:
    """The share of a layer's experts that the tokens of `passes` passes use, if tokens choose evenly."""
    return float(1 - (1 - work.experts) ** (work.tokens * passes))


def update_launches(layout: Layout, each: float = UPDATE) -> float:
    """Of updates of the tensors of all blocks by our own kernels, as gradients are handed over."""
    return each * sum(tensor.block is not None for tensor in layout.tensors)


def _expert_launches(layout: Layout, work: Workload) -> float:
    """The share of the layers of experts that the tokens of a pass use, in experts."""
    return 0.0 if _is_compiled(work) else met_share(work) * sum(experts.count for experts in layout.experts)


def experts_share(config: Any) -> float:
    """Experts per token divided by experts, from a model's config; 1 if it has no experts."""
    text = config.get_text_config()
    at_once = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None)
    counts = (getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    total = next((count for count in counts if isinstance(count, int) and count > 0), None)
    return min(1.0, at_once / total) if isinstance(at_once, int) and total else 1.0


def forward_flops(layout: Layout, work: Workload) -> float:
    """FLOPs of one pass over M tokens."""
    attention = 2 * layout.block_count * (work.length or work.tokens) * work.tokens * int(layout.table.shape[1])
    stacks = sum(t.shape.numel() for t in layout.tensors if t.block is not None and len(t.shape) == 3)
    met = layout.blocks_numel + sum(u.numel for u in layout.head_units) - (1 - work.experts) * stacks
    return 2.0 * met * work.tokens + attention


def activation_bytes(layout: Layout, work: Workload, room: Room) -> float:
    """Bytes that a copy moves in the time of the elementwise kernels of one forward pass."""
    rows, hidden = layout.table.shape
    logits = 6 * room.formats.dtype.itemsize * work.tokens * rows
    found = layout.counts
    each = found.forward_elements if found else FORWARD_H * hidden + FORWARD_W * layout.widest
    blocks = layout.block_count * work.tokens * each
    return float(SLOWER * (room.formats.dtype.itemsize * blocks + logits))


def _keeps(work: Workload, usual: str = "block") -> str:
    return usual if work.settings is None or work.settings.keeps is None else work.settings.keeps


def _is_compiled(work: Workload) -> bool:
    return work.settings is not None and work.settings.is_compiled


def forward_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """Forward passes in lockstep: every streamed unit is uploaded once, whatever the number of passes."""
    recorded = rates.gpu_bytes is not None and launched_as_graphs(layout, work.tokens)
    share, kernels = (COMPILED, COMPILED_KERNELS) if _is_compiled(work) else (1.0, 1.0)
    launches = work.passes * layout.block_count * (GRAPH[0] if recorded else UNRECORDED)
    launches += 0 if recorded else UNIT * len(layout.units)
    return StepWork(
        products=work.passes * forward_flops(layout, work),
        touched=work.passes * share * activation_bytes(layout, work, room),
        up=met_bytes(layout, streamed, work, room),
        recorded=recorded,
        launches=kernels * launches + work.passes * EXPERT[0] * _expert_launches(layout, work) + STEP,
    )


def _kept_share(layout: Layout, streamed: set[int], work: Workload, room: Room, plain: bool) -> float:
    """The share of the blocks that keep all activations and are not recomputed (model/backward/kept_blocks.py)."""
    how = _keeps(work, "none" if plain else "block")
    if how != "auto" or streamed or room.limit_bytes is None:
        return float(how == "none")
    left = room.limit_bytes - reverse_bytes(layout, streamed, work, room).total
    return min(1.0, max(0, int(KEPT * left / _block_activations(layout, work, room))) / max(1, layout.block_count))


def _block_activations(layout: Layout, work: Workload, room: Room) -> int:
    """Activation bytes of one block, for all micro-batches of a step."""
    width = HIDDEN * int(layout.table.shape[1]) + WIDE * layout.widest
    return room.formats.dtype.itemsize * work.passes * work.tokens * width


def _is_recorded(layout: Layout, work: Workload, rates: Rates, offers_compiled: bool) -> bool:
    """Whether blocks run as CUDA graphs (model/backward/reverse.py), as far as a batch is small; a budget without room
    for them is not considered."""
    own, how = work.settings, _keeps(work)
    possible = how in ("block", "auto")
    if _is_compiled(work):
        possible = offers_compiled and work.passes == 1 and how in ("block", "auto", "none")
    possible = possible and (own is None or vars(own).get("fused", True)) and launched_as_graphs(layout, work.tokens)
    whole = len(layout.of_kind("block")) == layout.block_count > 0
    return possible and whole and rates.gpu_bytes is not None and not layout.experts


def reverse_work(
    layout: Layout,
    streamed: set[int],
    work: Workload,
    room: Room,
    rates: Rates,
    *,
    weight_products: float = 1.0,
    reverses: int = 1,
    plain: bool = False,
    trains: bool = True,
    offers_compiled: bool = True,
) -> StepWork:
    """A forward pass and `reverses` backward passes, block by block, with one product per matrix for its gradient.
    weight_products: the share of these products that is computed; plain: torch's autograd over the whole model; trains:
    matrices and vectors have gradients; offers_compiled: linear layers of compiled blocks offer theirs. Units that
    slots still hold when the direction changes, at the begin and at the end of a backward pass, are not uploaded again.
    Costs of the update itself are added by the method."""
    passes, forward, elements = work.passes, forward_flops(layout, work), activation_bytes(layout, work, room)
    share_kept = _kept_share(layout, streamed, work, room, plain)
    again = 1.0 - share_kept  # the share of the blocks that is recomputed
    kept_bytes = 0
    if _keeps(work) == "auto":
        block = KEPT_GRAPH * _block_activations(layout, work, room)
        if layout.counts is not None:
            block = room.formats.dtype.itemsize * passes * work.tokens * layout.counts.saved_frozen
        kept_bytes = int(share_kept * layout.block_count * block)
    recorded = not plain and _is_recorded(layout, work, rates, offers_compiled)
    if recorded and room.limit_bytes is not None:  # the graphs' activations and gradients of a block, if there is room
        planned, b = reverse_bytes(layout, streamed, work, room), room.formats.dtype.itemsize
        graphs = planned.activations + room.workspace_bytes + trains * b * layout.blocks_numel // layout.block_count
        kept_bytes += graphs if planned.total + graphs <= room.limit_bytes else 0
    forwards = 1 + reverses * again
    before, back = GRAPH if recorded else (FORWARD, BACKWARD + trains * (TENSORS if plain else HANDED))
    launches = layout.block_count * (forwards * before + reverses * back)
    launches *= COMPILED_KERNELS if _is_compiled(work) and not recorded else 1.0
    if not plain:
        launches += _expert_launches(layout, work) * (forwards * EXPERT[0] + reverses * EXPERT[1])
    touched = passes * (COMPILED if _is_compiled(work) else 1.0) * elements
    homes, uploaded = room.formats.homes(layout), met_bytes(layout, streamed, work, room)
    uploaded -= min(uploaded, (slot_count(layout) - 1) * max((homes[i] for i in streamed), default=0))
    parks = work.parks and work.passes > 1  # gradients of all blocks' inputs too; and each input comes twice
    inputs = 0  # of all blocks and micro-batches, while they wait in host memory for the backward pass
    if _keeps(work) == "host":
        inputs = passes * work.tokens * layout.table.shape[1] * room.formats.dtype.itemsize * layout.block_count
    return StepWork(
        products=passes * forward * (1 + reverses * (again + 1 + weight_products)),
        touched=touched * (1 + reverses * (again + TWICE)),
        up=(1 + reverses) * uploaded + (1 + 2 * reverses if parks else reverses) * inputs,
        down=float((1 + reverses if parks else 1) * inputs),
        host_bytes=inputs + (3 * inputs // layout.block_count if parks else 0),
        kept_bytes=kept_bytes,
        forwards=forwards,
        recorded=recorded,
        launches=passes * launches + (PLAIN_STEP if plain else STEP),
    )


def unpacked_bytes(unit: Unit, room: Room) -> int:
    """Bytes that a kernel over a unit's weights at home reads."""
    numel, dtype = unit.numel, room.formats.home_dtype(unit)
    return room.formats.home_bytes(unit) if dtype == PACKED else numel * dtype.itemsize


FORMULAS = Formulas(forward_bytes, forward_work)
