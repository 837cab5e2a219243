"""Where every unit lives, how it is cut, and why: the decision behind `placement` and `gpu_memory`.

    resident   every unit on the device
    stream     every unit behind the link but the spine, and embedding and head where both take at most TABLES_BYTES;
               with a budget, as many units on the device as it leaves room for
    auto       resident if everything fits the budget (default: 95 % of the free memory), otherwise like stream

A unit is a whole block when that is a small copy, else a run of its matrices of about UNIT_BYTES: from there on a
larger copy is no faster (the link is within 2 % of its best rate), and slots and work buffers are what fills a small
GPU. When even that is too large for the budget, a unit is a run of at most the size of the largest matrix: a smaller
one would need the same slots, and three slots of small units are not far enough ahead. A matrix that alone exceeds
layout.TILE_NUMEL elements is cut by rows where the method allows it. Compiled zeroth-order passes want whole blocks.

Resident units are spread evenly between streamed ones, by bytes: while a resident unit is computed, the link works
ahead, but only as far as there are slots. Whole blocks in turn would need slots for a block; single units do not.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.machine.host import host_memory
from keyhole.machine.sizes import GIB, MIB, Bytes, about
from keyhole.methods.adam_offload.memory import SLACK_BYTES, check_host_state
from keyhole.methods.lsp.memory import limit_bytes, lsp_device_bytes
from keyhole.model.backward import memory as gradient
from keyhole.model.forward.memory import DeviceBytes, Workload, host_bytes, zo_device_bytes
from keyhole.model.structure.find import TILE_NUMEL
from keyhole.model.structure.layout import Layout, Unit, find_layout
from keyhole.model.weights.format import Wire
from keyhole.plan import refusals
from keyhole.plan.refusals import PLANNED

UNIT_BYTES = 256 * MIB
TABLES_BYTES = 512 * MIB
SLOT_COUNT = 3
ROW_METHODS = ("zo", "eval", "chat", "replay")  # forward passes only: they may have a large matrix a few rows at a time


@dataclass
class Placement:
    """The decision: pages to stream, slots, planned bytes, and the reasons, a line each."""

    streamed: set[int]
    slot_count: int
    device_bytes: DeviceBytes | gradient.GradientBytes
    work: Workload
    budget_bytes: int | None = None
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Costs:
    """Turns a set of streamed units into planned bytes."""

    work: Workload
    formats: Wire
    workspace_bytes: int
    limit_bytes: int | None  # what lsp may fill with moments

    def of(self, layout: Layout, streamed: set[int]) -> DeviceBytes | gradient.GradientBytes:
        how = {"formats": self.formats, "workspace_bytes": self.workspace_bytes}
        if self.work.method == "lsp":
            return lsp_device_bytes(layout, streamed, self.work, self.limit_bytes, **how)
        if self.work.method in gradient.METHODS:
            return gradient.gradient_device_bytes(layout, streamed, self.work, **how)
        return zo_device_bytes(layout, streamed, SLOT_COUNT, self.work, **how)

    def slot_count(self, layout: Layout) -> int:
        return gradient.slot_count(layout) if self.work.method in gradient.METHODS else SLOT_COUNT


def place(
    module: nn.Module,
    placement: str,
    gpu_memory: str | int | None,
    formats: Wire,
    device: torch.device,
    work: Workload,
) -> tuple[Layout, Placement]:
    """Cuts the model into units and decides which of them are streamed."""
    if placement not in ("resident", "stream", "auto"):
        raise UserError(f"placement: {placement!r} is not one of resident, stream, auto")
    budget = _budget(gpu_memory, placement, device)
    costs = _Costs(work, formats, workspace_bytes(device), limit_bytes(budget, device))
    whole = find_layout(module)
    resident = Placement(set(), 0, costs.of(whole, set()), work, budget)
    if placement == "resident" or (placement == "auto" and (budget is None or resident.device_bytes.total <= budget)):
        if budget is not None and work.method in PLANNED and resident.device_bytes.total > budget:
            raise refusals.resident_too_large(budget, resident.device_bytes, work, bool(whole.of_kind("block")))
        _check_state(whole, resident, formats, work)
        resident.reasons = _reasons(whole, resident, placement, formats, device, work)
        _enforce(budget, device)
        return whole, resident
    if not whole.of_kind("block"):
        raise UserError(
            f"placement: {type(module).__name__} has no list of repeated blocks, so there is nothing to stream unit by "
            "unit; use placement=resident"
        )
    layout, streamed = _fit(module, costs, budget)
    _check_host(host_bytes(layout, streamed, formats), placement)
    placed = Placement(streamed, costs.slot_count(layout), costs.of(layout, streamed), work, budget)
    _check_state(layout, placed, formats, work)
    placed.reasons = _reasons(layout, placed, placement, formats, device, work)
    _enforce(budget, device)
    return layout, placed


def _fit(module: nn.Module, costs: _Costs, budget: int | None) -> tuple[Layout, set[int]]:
    """The cut and the streamed units. Of the cuts that fit the budget, the one that streams the fewest bytes (a finer
    one needs smaller slots and buffers, so more may stay); at a tie the coarser, which has fewer, larger copies."""
    found, smallest = [], None
    cut_rows = costs.work.method in ROW_METHODS and not costs.formats.packs_blocks
    largest_matrix = max(u.numel for u in find_layout(module, 1, cut_rows).of_kind("block"))
    cuts = (UNIT_BYTES // costs.formats.dtype.itemsize, largest_matrix)
    for max_unit_numel in (None,) if costs.work.whole_blocks else cuts:
        layout = find_layout(module, max_unit_numel, cut_rows)
        streamed = {u.index for u in layout.units[1:]}
        if budget is None:
            tables = {u.index for u in layout.units if u.kind in ("table", "head")}
            small = sum(costs.formats.home_bytes(layout.units[i]) for i in tables) <= TABLES_BYTES
            return layout, streamed - tables if small else streamed
        smallest = costs.of(layout, streamed)
        if smallest.total <= budget:
            found.append((layout, _keep_what_fits(layout, streamed, costs, budget)))
    if found:
        return min(found, key=lambda one: host_bytes(*one, costs.formats))
    weights_bytes = sum(costs.formats.home_bytes(u) for u in layout.units)
    raise refusals.below_minimum(budget, smallest, costs.work, weights_bytes, costs.formats.dtype.itemsize)


def _keep_what_fits(layout: Layout, streamed: set[int], costs: _Costs, budget: int) -> set[int]:
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
    """What cuBLAS reserves a thread: 32 MiB from compute capability 9.0 on, 8 MiB and a little before."""
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


def _enforce(budget: int | None, device: torch.device) -> None:
    if budget is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)


def _check_host(needed: int, placement: str) -> None:
    memory = host_memory()
    missing = needed + SLACK_BYTES - memory.available_bytes
    if missing > 0:
        raise UserError(
            f"placement: {placement} keeps {needed / GIB:.2f} GiB of weights in host memory, but only "
            f"{memory.available_bytes / GIB:.2f} GiB are free: {missing / GIB:.2f} GiB are missing. Free memory, raise "
            "gpu_memory so that more stays on the GPU, or use a 16-bit dtype."
        )


def _check_state(layout: Layout, placed: Placement, formats: Wire, work: Workload) -> None:
    """Of a method that keeps its state in host memory: refused before a weight is read."""
    if work.method == "adam-offload":
        check_host_state(layout, placed.streamed, formats.dtype.itemsize)


def _reasons(
    layout: Layout, placed: Placement, placement: str, formats: Wire, device: torch.device, work: Workload
) -> list[str]:
    blocks = layout.of_kind("block")
    cut = len(blocks) // layout.block_count if layout.block_count else 0
    away = host_bytes(layout, placed.streamed, formats)
    total = sum(formats.home_bytes(u) for u in layout.units)
    lines = [
        f"units: {layout.block_count} x {layout.block_class}"
        + (f", each cut in {cut} so that a unit is about {UNIT_BYTES // MIB} MiB or one matrix" if cut > 1 else "")
        + f"; head {'tied to' if layout.tied else 'apart from'} the embedding, in {len(layout.head_units)} row chunks",
        f"placement: {placement}: {about(total - away)} of weights on the device, {about(away)} "
        f"streamed in {len(placed.streamed)} units through {placed.slot_count} slots",
    ]
    if layout.tiled_layers:
        lines.append(
            f"row tiles: {layout.tiled_layers} linear layers of more than {TILE_NUMEL >> 20} Mi weights are computed "
            "in tiles of output rows, streamed or resident: the same bits in both, those of the untiled product within "
            "rounding"
        )
    if placed.budget_bytes is not None:
        enforced = "enforced" if device.type == "cuda" else "not enforced on a CPU"
        lines.append(f"budget: {about(placed.budget_bytes)}, {enforced}")
    if device.type != "cuda" or work.method not in PLANNED:
        return lines
    parts = refusals.parts(placed.device_bytes, work.method)
    return [*lines, f"planned device peak: {about(placed.device_bytes.total)} ({parts})"]
