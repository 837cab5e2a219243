"""Where every unit lives, how it is cut, and why: the decision behind `placement` and `gpu_memory`.

    resident   every unit on the device
    stream     every unit behind the link but the spine, and embedding and head where both take at most TABLES_BYTES;
               with a budget, as many units on the device as it leaves room for
    auto       resident if everything fits the budget (default: 95 % of the free memory), otherwise like stream

A unit is a whole block when that is a small copy, else a run of its matrices of about UNIT_BYTES: from there on a
larger copy is no faster (the link is within 2 % of its best rate), and slots and work buffers are what fills a small
GPU. When even that is too large for the budget, a unit is a run of at most the size of the largest matrix: a smaller
one would need the same slots, and three slots of small units are not far enough ahead. A matrix that alone exceeds
find.TILE_NUMEL elements is cut by rows where the method allows it, a stack of experts that exceeds a unit into experts.
Compiled zeroth-order passes want whole blocks.

Resident units are spread evenly between streamed ones, by bytes: while a resident unit is computed, the link works
ahead, but only as far as there are slots. Whole blocks in turn would need slots for a block; single units do not.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.machine.host import host_memory, host_sum
from keyhole.machine.sizes import GIB, MIB, Bytes, about
from keyhole.methods import METHODS
from keyhole.methods.base import DeviceBytes, Room, Traits, Workload, imported
from keyhole.methods.memory import forward_bytes
from keyhole.model.backward import memory as backward
from keyhole.model.forward.memory import SLOT_COUNT, evaluation_bytes, host_bytes
from keyhole.model.structure.find import TILE_NUMEL
from keyhole.model.structure.layout import Layout, Unit, find_layout
from keyhole.model.weights.format import Wire
from keyhole.offload.shards import part_numel
from keyhole.plan import refusals
from keyhole.plan.dtype import check_trainable
from keyhole.plan.experts import expert_lines
from keyhole.plan.outside import outside_lines

UNIT_BYTES = 256 * MIB
TABLES_BYTES = 512 * MIB
USABLE = 0.95  # of the device's memory, where no budget is given
SLACK_BYTES = GIB  # of host memory: Python, PyTorch and the CUDA driver


@dataclass
class Placement:
    """The decision: pages to stream, slots, planned bytes, and the reasons, one per line."""

    streamed: set[int]
    slot_count: int
    device_bytes: DeviceBytes
    work: Workload
    formats: Wire
    workspace_bytes: int
    budget_bytes: int | None = None
    limit_bytes: int | None = None  # what a method may fill with state
    adapter: Path | None = None  # fixed adapters that were loaded with the model
    reasons: list[str] = field(default_factory=list)

    def evaluation_passes(self, layout: Layout, most: int) -> int:
        """How many batches of the planned size may go through the model together, in the memory that a step leaves free
        when it is over; at most `most`. A batch that crosses the link alone costs time, one too many the run."""
        limit = self.budget_bytes if self.budget_bytes is not None else self.limit_bytes
        if limit is None or not self.streamed:
            return most if self.streamed else 1
        free = self.device_bytes.during_a_step + max(0, limit - self.device_bytes.total)
        tokens, formats, workspace = self.work.tokens, self.formats, self.workspace_bytes
        for n in range(most, 1, -1):
            if evaluation_bytes(layout, tokens=tokens, passes=n, formats=formats, workspace_bytes=workspace) <= free:
                return n
        return 1

    def check_method(self, method: str) -> None:
        """When a method is made on the model: refuses adapters that it does not own and a dtype in which it cannot
        train, and warns where the budget was planned for another method, since this one may need more memory."""
        if self.adapter is not None:
            raise refusals.trained_below_adapters(self.adapter, method)
        check_trainable(self.formats.dtype, method)
        if self.budget_bytes is not None and self.work.method != method and METHODS[method].sweep == "reverse":
            refusals.warn_of_another_plan(self.budget_bytes, self.work.method, method)


@dataclass(frozen=True)
class Costs:
    """Plans the bytes for a set of streamed units. row: None for forward passes alone (evaluation, chat, replay)."""

    work: Workload
    room: Room
    row: Traits | None

    def of(self, layout: Layout, streamed: set[int]) -> DeviceBytes:
        plan = forward_bytes if self.row is None else self.row.planned_bytes
        cut = self.cut(layout)
        if not cut:
            return plan(layout, streamed, self.work, self.room)
        # units that ranks share out come into slots, wherever their parts are; gradients of a block are put side by
        # side, and a unit of them is exchanged in float32 at most, sent and received
        found, formats = plan(layout, streamed | set(cut), self.work, self.room), self.room.formats
        assert isinstance(found, backward.ReverseBytes)
        kept = sum(n * formats.home_dtype(layout.units[i]).itemsize for i, (_, n) in cut.items() if i not in streamed)
        block = sum(u.numel for u in layout.of_kind("block")) // max(1, layout.block_count)
        exchanged = formats.dtype.itemsize * block + 8 * max(layout.units[i].numel for i in cut)
        return replace(found, homes=found.homes + kept, gradients=found.gradients + exchanged)

    def cut(self, layout: Layout) -> dict[int, tuple[int, int]]:
        """Of units that ranks share out: the first element and the number of those that one of them keeps."""
        if self.work.ranks == 1 or self.row is None or self.row.ranks != "shards":
            return {}
        units = [u for u in layout.units if u.kind in ("block", "head")]
        return {u.index: (0, part_numel(u.numel, self.work.ranks)) for u in units}

    def host_bytes(self, layout: Layout, streamed: set[int]) -> int:
        """Host memory of streamed units, of all ranks of this machine: parts; or all weights, blocks of which are there
        once (keyhole/loading)."""
        formats, cut, here = self.room.formats, self.cut(layout), self.work.local_ranks
        if here == 1 and not cut:
            return host_bytes(layout, streamed, formats)
        shared = {u.index for u in layout.of_kind("block")} & streamed if not cut else set()
        kept = sum(n * formats.home_dtype(layout.units[i]).itemsize for i, (_, n) in cut.items() if i in streamed)
        return here * (kept + host_bytes(layout, streamed - set(cut) - shared, formats)) + host_bytes(
            layout, shared, formats
        )

    def slot_count(self, layout: Layout) -> int:
        return backward.slot_count(layout) if self.row is not None and self.row.sweep == "reverse" else SLOT_COUNT

    @property
    def is_planned(self) -> bool:
        """Whether all that a training step needs is known; of a baseline it is not."""
        return self.row is not None and self.row.streams

    @property
    def may_cut_rows(self) -> bool:
        """Forward passes may have a large matrix a few rows at a time."""
        return (self.row is None or self.row.sweep == "forward") and not self.room.formats.packs

    @property
    def may_cut_experts(self) -> bool:
        """Experts may come one by one where the method says so; never of a packed format, nor where ranks shard."""
        sharded = self.row is not None and self.row.ranks == "shards" and self.work.ranks > 1
        if self.room.formats.packs or sharded:
            return False
        return self.row is None or self.row.by_expert(self.work.settings or self.row.settings())

    @property
    def keeps_blocks_whole(self) -> bool:
        return self.row is not None and self.row.whole_blocks(self.work.settings or self.row.settings())


def place(
    module: nn.Module,
    placement: str,
    gpu_memory: str | int | None,
    formats: Wire,
    device: torch.device,
    work: Workload,
) -> tuple[Layout, Placement]:
    """Cuts the model into units and decides which of them are streamed. What cannot fit is refused, with the cheapest
    changes that would make it fit."""
    try:
        return _place(module, placement, gpu_memory, formats, device, work)
    except refusals.DoesNotFit as refused:
        from keyhole.plan.changes import said  # it plans rows, which are placed here

        budget = _limit_bytes(_budget(gpu_memory, placement, device), device)
        fills = placement == "stream" and gpu_memory is not None  # as auto does
        how = "auto" if fills else placement
        raise UserError(f"{refused}{said(module, how, budget, formats, device, work)}") from None


def _place(
    module: nn.Module,
    placement: str,
    gpu_memory: str | int | None,
    formats: Wire,
    device: torch.device,
    work: Workload,
) -> tuple[Layout, Placement]:
    if placement not in ("resident", "stream", "auto"):
        raise UserError(f"placement: {placement!r} is not one of resident, stream, auto")
    budget = _budget(gpu_memory, placement, device)
    room = Room(formats, workspace_bytes(device), _limit_bytes(budget, device), budget is not None)
    costs = Costs(work, room, METHODS.get(work.method))
    whole = find_layout(module)
    resident = Placement(
        set(), 0, costs.of(whole, set()), work, formats, room.workspace_bytes, budget, room.limit_bytes
    )
    if placement == "resident" or (placement == "auto" and (budget is None or resident.device_bytes.total <= budget)):
        if budget is not None and costs.is_planned and resident.device_bytes.total > budget:
            raise refusals.resident_too_large(budget, resident.device_bytes, work, bool(whole.of_kind("block")))
        if budget is None and device.type == "cuda" and costs.row is not None:
            _check_device(whole, resident.device_bytes, costs, device)
        _check_state(whole, resident, costs)
        resident.reasons = _reasons(module, whole, resident, placement, costs, device)
        return whole, resident
    if not whole.of_kind("block"):
        raise UserError(
            f"placement: {type(module).__name__} has no list of repeated blocks, so there is nothing to stream unit by "
            "unit; use placement=resident"
        )
    layout, streamed = fit(module, costs, budget)
    _check_host(costs.host_bytes(layout, streamed), placement)
    planned, slots = costs.of(layout, streamed), costs.slot_count(layout)
    placed = Placement(streamed, slots, planned, work, formats, room.workspace_bytes, budget, room.limit_bytes)
    _check_state(layout, placed, costs)
    placed.reasons = _reasons(module, layout, placed, placement, costs, device)
    return layout, placed


Find = Callable[[nn.Module, int | None, bool, bool], Layout]


def fit(module: nn.Module, costs: Costs, budget: int | None, find: Find = find_layout) -> tuple[Layout, set[int]]:
    """The cut and the streamed units. Of the cuts that fit the budget, the one that streams the fewest bytes (a finer
    one needs smaller slots and buffers, so more may stay); at a tie the coarser, which has fewer, larger copies. find:
    makes a layout, or remembers it."""
    formats, cut = costs.room.formats, (costs.may_cut_rows, costs.may_cut_experts)
    largest_matrix = max(u.numel for u in find(module, 1, *cut).of_kind("block"))
    cuts = (None,) if costs.keeps_blocks_whole else (UNIT_BYTES // formats.dtype.itemsize, largest_matrix)
    if budget is None:
        layout = find(module, cuts[0], *cut)
        tables = {u.index for u in layout.units if u.kind in ("table", "head")}
        small = sum(formats.home_bytes(layout.units[i]) for i in tables) <= TABLES_BYTES
        return layout, {u.index for u in layout.units[1:]} - (tables if small else set())
    found: list[tuple[int, Layout, set[int]]] = []
    for max_unit_numel in cuts:
        layout = find(module, max_unit_numel, *cut)
        streamed = {u.index for u in layout.units[1:]}
        smallest = costs.of(layout, streamed)
        if smallest.total <= budget:
            streamed = _keep_what_fits(layout, streamed, costs, budget)
            found.append((host_bytes(layout, streamed, formats), layout, streamed))
    if found:
        _, layout, streamed = min(found, key=lambda one: one[0])
        return layout, streamed
    weights_bytes = sum(formats.home_bytes(u) for u in layout.units)
    raise refusals.below_minimum(budget, smallest, costs.work, weights_bytes, formats.dtype.itemsize)


def _keep_what_fits(layout: Layout, streamed: set[int], costs: Costs, budget: int) -> set[int]:
    """What is left to stream when the tables (each whole) and then as many block units as the budget allows stay."""
    for kind in ("table", "head"):
        fewer = streamed - {u.index for u in layout.of_kind(kind)}
        if costs.of(layout, fewer).total <= budget:
            streamed = fewer
    groups = _inseparable(layout.of_kind("block"))

    def left(count: int) -> set[int]:
        return streamed - _spread(groups, count / len(groups))

    too_many = bisect_left(range(len(groups) + 1), True, key=lambda n: costs.of(layout, left(n)).total > budget)
    return left(too_many - 1)


def _inseparable(units: list[Unit]) -> list[list[Unit]]:
    """Units in groups that live in one place: those that share a tensor."""
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.tensors[0].name, []).append(unit)
    return list(groups.values())


def _spread(groups: list[list[Unit]], share: float) -> set[int]:
    """Units of this share of all elements, evenly spread: one is taken when at least half of it is due."""
    taken, due = set(), 0.0
    for group in groups:
        numel = sum(u.numel for u in group)
        due += share * numel
        if due >= numel / 2:
            taken |= {u.index for u in group}
            due -= numel
    return taken


def workspace_bytes(device: torch.device) -> int:
    """What cuBLAS reserves per thread: 32 MiB from compute capability 9.0 on, 8 MiB and a little before."""
    if device.type != "cuda":
        return 0
    return 32 * MIB if torch.cuda.get_device_capability(device)[0] >= 9 else 8 * MIB + 128 * 1024


def _budget(gpu_memory: str | int | None, placement: str, device: torch.device) -> int | None:
    if gpu_memory is not None:
        try:
            return int(Bytes.parse(gpu_memory))
        except ValueError as error:
            raise UserError(f"gpu_memory: {gpu_memory!r} is not {error}") from error
    if placement == "auto" and device.type == "cuda":
        return int(0.95 * torch.cuda.mem_get_info(device)[0])
    return None


def _check_device(layout: Layout, needed: DeviceBytes, costs: Costs, device: torch.device) -> None:
    """Without a budget the whole device is one: what it cannot hold at all is refused before a weight is read. Of a
    baseline only what is sure counts: weights, gradients and state."""
    have = torch.cuda.get_device_properties(device).total_memory
    if costs.is_planned and needed.total > have:
        raise refusals.resident_too_large(have, needed, costs.work, bool(layout.of_kind("block")))
    sure = sum(getattr(needed, part, 0) for part in ("homes", "gradients", "state"))
    if not costs.is_planned and sure > have:
        raise refusals.resident_too_large(have, needed, costs.work, streams=False)


def _check_host(needed: int, placement: str) -> None:
    available = host_memory().available_bytes
    if needed + SLACK_BYTES > available:
        sums = host_sum(needed, SLACK_BYTES, available)
        raise refusals.DoesNotFit(
            f"placement: {placement} keeps weights in host memory: {sums}. Free memory, raise gpu_memory so that more "
            "stays on the GPU, or use a 16-bit dtype."
        )


def _check_state(layout: Layout, placed: Placement, costs: Costs) -> None:
    """State that a method keeps in host memory is refused before a weight is read."""
    if costs.row is not None and costs.row.host_check is not None:
        try:
            about = {"cut": costs.cut(layout), "ranks": costs.work.local_ranks, "of": costs.work.ranks}
            imported(costs.row.host_check)(layout, placed.streamed, costs.room.formats.dtype.itemsize, **about)
        except UserError as error:
            raise refusals.DoesNotFit(str(error)) from error


def _limit_bytes(budget: int | None, device: torch.device) -> int | None:
    """What state may fill: the budget, or most of the device; None where there is no device memory of its own."""
    if budget is not None or device.type != "cuda":
        return budget
    return int(USABLE * torch.cuda.get_device_properties(device).total_memory)


def _reasons(
    module: nn.Module, layout: Layout, placed: Placement, placement: str, costs: Costs, device: torch.device
) -> list[str]:
    formats, blocks = costs.room.formats, layout.of_kind("block")
    cut = len(blocks) // layout.block_count if layout.block_count else 0
    away = host_bytes(layout, placed.streamed, formats)
    total = sum(formats.home_bytes(u) for u in layout.units)
    head = f"{'tied to' if layout.tied else 'apart from'} the embedding, in {len(layout.head_units)} row chunks"
    lines = [
        f"units: {layout.block_count} x {layout.block_class}"
        + (
            f", each cut in {cut} so that a unit is about {UNIT_BYTES // MIB} MiB, one matrix or one expert"
            if cut > 1
            else ""
        )
        + (f"; head {head}" if layout.head_units else "; the head of a classifier stays on the device"),
        f"placement: {placement}: {about(total - away)} of weights on the device, {about(away)} "
        f"streamed in {len(placed.streamed)} units through {placed.slot_count} slots",
    ]
    if formats.frozen is not None:
        lines.append(formats.frozen.describe(blocks))
    lines += outside_lines(module, layout)
    lines += expert_lines(layout, placed.streamed, costs.may_cut_experts, formats.dtype.itemsize)
    if layout.tiled_layers:
        lines.append(
            f"row tiles: {layout.tiled_layers} linear layers of more than {TILE_NUMEL >> 20} Mi weights are computed "
            "in tiles of output rows, streamed or resident: the same bits in both, those of the untiled product within "
            "rounding"
        )
    if placed.budget_bytes is not None:
        enforced = "enforced" if device.type == "cuda" else "not enforced on a CPU"
        lines.append(f"budget: {about(placed.budget_bytes)}, {enforced}")
    if device.type != "cuda" or not costs.is_planned:
        return lines
    parts = refusals.parts(placed.device_bytes)
    return [*lines, f"planned device peak: {about(placed.device_bytes.total)} ({parts})"]
