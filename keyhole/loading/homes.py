"""Homes for all units, in memory of exactly their size, and the engine that moves them.

    resident             adjacent in device memory
    streamed             adjacent in host memory
    streamed, shared     one copy for the ranks of a machine, if each computes with all weights (offload/arena.py)
    sharded              this rank's part of every unit, streamed or resident (offload/sharded.py)

Every home begins at a multiple of ALIGN_BYTES. The homes are still empty: the caller fills and page-locks them.
"""

import torch

from keyhole.errors import UserError
from keyhole.loading.prepare import Prepared
from keyhole.methods import METHODS
from keyhole.methods.workload import Workload
from keyhole.model.backward import memory as backward
from keyhole.model.structure.layout import Layout, Unit
from keyhole.model.weights.format import PACKED, Wire
from keyhole.offload import arena
from keyhole.offload.engine import Engine, EngineOptions
from keyhole.offload.sharded import ShardedEngine, part_numel
from keyhole.plan.placement import Placement
from keyhole.ranks import Ranks

ALIGN_BYTES = 256


def make_engine(
    ready: Prepared,
    device: torch.device,
    work: Workload,
    ranks: Ranks,
    options: EngineOptions,
) -> Engine:
    """Homes for all units, still empty, and the engine that moves them: for one process, for ranks that share a copy of
    them, or for units that are sharded over the ranks."""
    layout, placed, row = ready.layout, ready.placed, METHODS.get(work.method)
    ranks.barrier()  # every rank has planned with the free memory, and none has allocated yet
    how = None if row is None else row.ranks
    shared = sharded = frozenset[int]()
    if how == "replicas" and ranks.has_neighbours:  # each rank computes with all weights; other units change every step
        shared = frozenset(unit.index for unit in layout.of_kind("block") if unit.index in placed.streamed)
        _check_same(layout, shared, ranks)
        if shared and ranks.local_size > 1:
            placed.reasons.append(
                f"host memory: {ranks.local_size} ranks share one copy of the {len(shared)} streamed units"
            )
    elif how == "shards" and ranks.several:  # embedding and common are small, and replicated on every rank
        sharded = frozenset(unit.index for unit in layout.units if unit.kind in ("block", "head"))
        _check_same(layout, None, ranks)
        count = f"{len(sharded)} units (blocks and head)"
        placed.reasons.append(f"shards: each of {ranks.size} ranks keeps a part of {count}")
    homes = _reserve(layout, placed, ready.formats, device, shared, sharded, ranks)
    options["slot_count"] = (
        options["slot_count"] or placed.slot_count or (backward.slot_count(layout) if sharded else 0)
    )
    if sharded:
        options["slot_count"] = min(ranks.objects(options["slot_count"]))  # uploads are collectives, in one order
        numels = {page: layout.units[page].numel for page in sharded}
        return ShardedEngine(homes, numels, placed.streamed, device, ranks, **options)
    return Engine(homes, placed.streamed, device, shared=shared, **options)


def _check_same(layout: Layout, shared: frozenset[int] | None, ranks: Ranks) -> None:
    """UserError if other ranks would cut the model into other units, or if those that ranks of a machine share are not
    the same there, or none elsewhere (all ranks rewrite shared units together)."""
    mine = [unit.start for unit in layout.units]
    for rank, (machine, cut, its) in enumerate(ranks.objects((ranks.machine, mine, shared))):
        if shared is None and cut != mine:
            what = "ranks would cut the model into different units"
        elif its != shared and (machine == ranks.machine or not its or not shared):
            what = f"ranks {ranks.rank} and {rank} would stream different units, of which a machine's share one copy"
        else:
            continue
        raise UserError(
            f"gpu_memory: {what}, since other memory is free on their GPUs; set gpu_memory to what all of them have"
        )


def _reserve(
    layout: Layout,
    placed: Placement,
    formats: Wire,
    device: torch.device,
    shared: frozenset[int],
    sharded: frozenset[int],
    ranks: Ranks,
) -> list[torch.Tensor]:
    """One home per unit: streamed units adjacent in host memory, units that ranks share in their own shared memory, the
    others adjacent on the device. For sharded units: this rank's part."""

    def home_bytes(unit: Unit) -> int:
        if unit.index not in sharded:
            return formats.home_bytes(unit)
        return part_numel(unit.numel, ranks.size) * formats.home_dtype(unit).itemsize

    homes: list[torch.Tensor] = [torch.empty(0)] * len(layout.units)
    for pages in (shared, placed.streamed - shared, {u.index for u in layout.units} - placed.streamed):
        units = [u for u in layout.units if u.index in pages]
        sizes = [-(-home_bytes(u) // ALIGN_BYTES) * ALIGN_BYTES for u in units]
        if pages and pages <= placed.streamed:
            flat = arena.shared_memory(sum(sizes), ranks) if pages is shared else arena.host_memory(sum(sizes))
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for unit, piece in zip(units, flat.split(sizes), strict=True):
            home = piece[: home_bytes(unit)].view(formats.home_dtype(unit))
            homes[unit.index] = home
            if unit.index in sharded:
                home.zero_()
            elif home.dtype != PACKED:
                _zero_padding(unit, home)
    return homes


def _zero_padding(unit: Unit, home: torch.Tensor) -> None:
    """Zeroes the padding between aligned tensors: reserved memory may hold anything, and copies of it are compared."""
    starts = [tensor.start - unit.start for tensor in unit.tensors] + [unit.numel]  # a common unit may have no tensors
    for tensor, begin in zip(unit.tensors, starts[1:], strict=True):
        end = tensor.stop - unit.start
        if end < begin:
            home[end:begin] = 0
