"""How a model is cut into units, and which of them stay on the device, for a budget.

A unit is a whole block if the block is small, else a run of its matrices of about UNIT_BYTES: copies of that size
already reach the link's full rate within 2 %, and larger slots and work buffers would fill a small GPU. If even that is
too large for the budget, a unit is a run of at most the size of the largest matrix: smaller units would need the same
slots, and three slots of small units do not prefetch far enough ahead. A matrix of more than find.TILE_NUMEL elements
is cut by rows if the method allows it; a stack of experts larger than a unit is cut into experts. Compiled zeroth-order
passes need whole blocks.

With a budget, embedding and head stay on the device if they fit, and then as many block units as fit. These are spread
evenly between streamed ones, by bytes: while a resident unit is computed, the link prefetches the next units, but only
as far as there are slots. Alternating whole blocks would need slots for a block; alternating single units does not.

Which units are streamed is tried out: `Costs` answers for each set what a step would need. Most of it is the
method's own formula (`device_bytes` of its row, methods/traits.py); here is what several ranks add to it:

    sharded units     every rank keeps 1 / ranks of a unit's elements, and gathers the rest into slots as if the unit
                      were streamed; gradients are exchanged unit by unit in float32, with a send and a receive buffer
    shared homes      ranks on one machine that all have all weights keep one copy of streamed blocks between them

A refusal names the minimum and what fills it; placement.py adds the changes that would fit. Of a baseline, whose other
needs are not planned, only the weights are named.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from keyhole.errors import UserError
from keyhole.machine.sizes import MIB, about, enough
from keyhole.methods import METHODS, streaming_methods
from keyhole.methods.settings import MethodSettings
from keyhole.methods.traits import Traits
from keyhole.methods.work import forward_bytes
from keyhole.methods.workload import DeviceBytes, Room, Workload
from keyhole.model.backward import memory as backward
from keyhole.model.backward.memory import ReverseBytes
from keyhole.model.forward.memory import ALLOCATOR_SLACK, SLOT_COUNT, host_bytes
from keyhole.model.structure.layout import Layout, Unit, find_layout
from keyhole.offload.sharded import part_numel

UNIT_BYTES = 256 * MIB
TABLES_BYTES = 512 * MIB
ENOUGH = 2048  # tokens of a pass with which products are fast on any GPU
NEAR = 1.1
Find = Callable[[nn.Module, int | None, bool, bool], Layout]


class DoesNotFit(UserError):
    """The memory is too small for the run; placement.py adds the changes that would fit."""


def parts(device_bytes: Any, trains: bool = True) -> str:
    """The parts that fill the device, without empty ones. Without training, there are no perturbed weights."""
    names = {} if trains else {"perturbed": "buffers"}
    found = {names.get(field.name, field.name): getattr(device_bytes, field.name) for field in fields(device_bytes)}
    return ", ".join(f"{name}: {about(count)}" for name, count in found.items() if count)


def too_small(budget: int, needed: DeviceBytes, work: Workload, streamed: bool, fix: str = "") -> DoesNotFit:
    """The budget cannot hold a resident model, or the least that a streamed one needs. fix: beside raising it."""
    trains = work.method in METHODS
    least = "the minimum of {}" if streamed else "the {} that placement=resident needs"
    at = f" at {work.tokens} tokens per pass" if trains else ""
    return DoesNotFit(
        f"gpu_memory: {about(budget)} is below {least.format(enough(needed.total))} for this model and {work.method}"
        f"{at} ({parts(needed, trains)}). Raise gpu_memory{fix}."
    )


@dataclass(frozen=True)
class Costs:
    """Plans the bytes for a set of streamed units. row: None for forward passes only (evaluation, chat, replay)."""

    work: Workload
    room: Room
    row: Traits | None

    def of(self, layout: Layout, streamed: set[int]) -> DeviceBytes:
        """The device peak of a step. Of activations=auto: with all block inputs on the device if the limit has room
        for them, else with as many as it has room for beside those on their way to host memory."""
        if self._keeps != "auto":
            return self._of(layout, streamed, self.work)
        limit, found = self.room.limit_bytes, self._of(layout, streamed, self._keeping("block"))
        if limit is None or found.total <= limit:
            return found
        work = self._waiting(layout)
        found = self._of(layout, streamed, work)
        assert isinstance(found, ReverseBytes)
        if work.parks:
            return found
        each = backward.input_bytes(layout, self.work.tokens * self.work.passes, self.room.formats.dtype.itemsize)
        return replace(found, kept=found.kept + each * max(0, int((limit - found.total) / ALLOCATOR_SLACK / each)))

    def waiting_blocks(self, layout: Layout, streamed: set[int]) -> int:
        """The blocks whose inputs wait in host memory for the backward pass."""
        if self._keeps != "auto" or self.room.limit_bytes is None:
            return layout.block_count if self._keeps == "host" else 0
        found, itemsize = self.of(layout, streamed), self.room.formats.dtype.itemsize
        each = backward.input_bytes(layout, self.work.tokens * self.work.passes, itemsize)
        return backward.first_kept(layout.block_count, each, found.kept) if isinstance(found, ReverseBytes) else 0

    def work_of(self, layout: Layout, streamed: set[int]) -> Workload:
        """The work with activations=auto decided: host, where not all block inputs stay on the device."""
        waits = self._keeps == "auto" and self.waiting_blocks(layout, streamed) > 0
        return self._waiting(layout) if waits else self.work

    def _waiting(self, layout: Layout) -> Workload:
        """With inputs in host memory; and what passes hold between blocks, where nothing else would fit."""
        work, everything = self._keeping("host"), {unit.index for unit in layout.units[1:]}
        may_park = work.passes > 1 and not layout.has_expert_units and not self.cut(layout)
        tight = may_park and self._of(layout, everything, work).total > (self.room.limit_bytes or math.inf)
        return replace(work, parks=tight)

    @property
    def _own(self) -> MethodSettings | None:
        return None if self.row is None else self.work.settings or self.row.settings()

    @property
    def _keeps(self) -> str | None:
        return self._own.keeps if self._own is not None and self.is_planned else None

    def _keeping(self, activations: str) -> Workload:
        own: Any = self._own
        return replace(self.work, settings=replace(own, activations=activations))

    def _of(self, layout: Layout, streamed: set[int], work: Workload) -> DeviceBytes:
        plan = forward_bytes if self.row is None else self.row.planned_bytes
        cut = self.cut(layout)
        if not cut:
            return plan(layout, streamed, work, self.room)
        # sharded units are gathered into slots, wherever their shards are; gradients of a block are kept side by side,
        # and at most one unit of them is exchanged at a time in float32, with a send and a receive buffer
        found, formats = plan(layout, streamed | set(cut), work, self.room), self.room.formats
        assert isinstance(found, ReverseBytes)
        kept = sum(n * formats.home_dtype(layout.units[i]).itemsize for i, (_, n) in cut.items() if i not in streamed)
        block = sum(u.numel for u in layout.of_kind("block")) // max(1, layout.block_count)
        exchanged = formats.dtype.itemsize * block + 8 * max(layout.units[i].numel for i in cut)
        return replace(found, homes=found.homes + kept, gradients=found.gradients + exchanged)

    def cut(self, layout: Layout) -> dict[int, tuple[int, int]]:
        """For sharded units: the first element and the number of elements of this rank's shard."""
        if self.work.ranks == 1 or self.row is None or self.row.ranks != "shards":
            return {}
        units = [u for u in layout.units if u.kind in ("block", "head")]
        return {u.index: (0, part_numel(u.numel, self.work.ranks)) for u in units}

    def host_bytes(self, layout: Layout, streamed: set[int]) -> int:
        """Host memory of streamed units, of all ranks of this machine: shards; or all weights, where blocks are shared
        by the ranks (keyhole/loading)."""
        formats, cut, here = self.room.formats, self.cut(layout), self.work.local_ranks
        if here == 1 and not cut:
            return host_bytes(layout, streamed, formats)
        shared = {u.index for u in layout.of_kind("block")} & streamed if not cut else set()
        kept = sum(n * formats.home_dtype(layout.units[i]).itemsize for i, (_, n) in cut.items() if i in streamed)
        return here * (kept + host_bytes(layout, streamed - set(cut) - shared, formats)) + host_bytes(
            layout, shared, formats
        )

    def splits(self, budget: int | None) -> Iterator[Costs]:
        """The step as it is, and with its passes split into ever smaller ones, if they may be."""
        own, rows = self._own, self.work.batch
        if own is None or not self.is_planned:
            yield self
        elif own.micro_batch_size != "auto":
            yield replace(self, work=self.work.split(int(own.micro_batch_size)))
        else:
            if self.work.pass_tokens is not None and self.work.length and budget is not None:
                yield replace(self, work=self.work.split(max(1, self.work.pass_tokens // self.work.length)))
            yield self
            while budget is not None and rows > 1:
                rows = -(-rows // 2)
                yield replace(self, work=self.work.split(rows))

    def slot_count(self, layout: Layout) -> int:
        return backward.slot_count(layout) if self.row is not None and self.row.sweep == "reverse" else SLOT_COUNT

    @property
    def is_planned(self) -> bool:
        """Whether the memory of a training step is fully planned; for a baseline it is not."""
        return self.row is not None and self.row.streams

    @property
    def may_cut_rows(self) -> bool:
        """Whether forward passes may compute a large matrix a few rows at a time."""
        return (self.row is None or self.row.sweep == "forward") and not self.room.formats.packs

    @property
    def may_cut_experts(self) -> bool:
        """Whether experts may be streamed one by one: if the method allows it, not in a packed format, not with
        shards."""
        sharded = self.row is not None and self.row.ranks == "shards" and self.work.ranks > 1
        allowed = self.row is None or (self.work.settings or self.row.settings()).by_expert
        return allowed and not (self.room.formats.packs or sharded)

    def finest(self, find: Find, module: nn.Module) -> tuple[int | None, bool, bool]:
        """The finest cut, as arguments of `find`: units no larger than the largest matrix."""
        cut = self.may_cut_rows, self.may_cut_experts
        return None if self.keeps_blocks_whole else find(module, 1, *cut).largest_block_unit, *cut

    @property
    def keeps_blocks_whole(self) -> bool:
        return self.row is not None and (self.work.settings or self.row.settings()).whole_blocks


def split(
    costs: Costs, budget: int | None, place: Callable[[Costs], tuple[Layout, set[int]]]
) -> tuple[Costs, Layout, set[int]]:
    """The passes of a step, and where the model lives beside them: a function of shapes and the budget alone. Smaller
    passes leave more room for weights; of those of at least ENOUGH tokens (or, where none of them fits, of the largest
    that do) it takes the fewest with which at most NEAR times as many bytes are streamed as with the smallest. place:
    finds the place for a split, or raises DoesNotFit."""
    found: list[tuple[int, tuple[Costs, Layout, set[int]]]] = []
    refused = None
    for one in costs.splits(budget):
        if found and one.work.tokens < ENOUGH:
            break
        try:
            layout, streamed = place(one)
        except DoesNotFit as error:
            refused = error
            continue
        found.append((host_bytes(layout, streamed, costs.room.formats), (one, layout, streamed)))
        if not streamed or (costs.row is not None and costs.row.sweep == "forward") or one.work.is_as_before:
            break
    if not found:
        assert refused is not None
        raise refused
    least = min(size for size, _ in found)
    return next(one for size, one in found if size <= NEAR * least)


def fit(module: nn.Module, costs: Costs, budget: int | None, find: Find = find_layout) -> tuple[Layout, set[int]]:
    """The cut and the streamed units. Of the cuts that fit the budget, it takes the one that streams the fewest bytes
    (a finer cut needs smaller slots and buffers, so more units may stay); of equal ones the coarser, with fewer, larger
    copies. find: makes a layout, or returns a cached one."""
    formats, cut = costs.room.formats, (costs.may_cut_rows, costs.may_cut_experts)
    finest, *_ = costs.finest(find, module)
    cuts = (None,) if costs.keeps_blocks_whole else (UNIT_BYTES // formats.dtype.itemsize, finest)
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
    if costs.row is not None and not costs.row.streams:
        raise DoesNotFit(
            f"gpu_memory: {about(budget)} cannot hold the weights, {about(sum(formats.homes(layout)))}, and "
            f"{costs.work.method} cannot stream them. Raise gpu_memory, or use method={streaming_methods()}."
        )
    halves = costs.row is None and formats.dtype.itemsize > 2 and costs.work.method != "replay"
    raise too_small(budget, smallest, costs.work, streamed=True, fix=", or use dtype=bfloat16" if halves else "")


def _keep_what_fits(layout: Layout, streamed: set[int], costs: Costs, budget: int) -> set[int]:
    """The units to stream when embedding and head (each as a whole) and then as many block units as the budget allows
    stay on the device."""
    for kind in ("table", "head"):
        fewer = streamed - {u.index for u in layout.of_kind(kind)}
        if costs.of(layout, fewer).total <= budget:
            streamed = fewer
    together: dict[str, list[Unit]] = {}  # units that share a tensor
    for unit in layout.of_kind("block"):
        together.setdefault(unit.tensors[0].name, []).append(unit)
    groups = [(sum(u.numel for u in group), {u.index for u in group}) for group in together.values()]

    def left(count: int) -> set[int]:
        return streamed - _spread(groups, count / len(groups))

    too_many = bisect_left(range(len(groups) + 1), True, key=lambda n: costs.of(layout, left(n)).total > budget)
    return left(too_many - 1)


def _spread(groups: list[tuple[int, set[int]]], share: float) -> set[int]:
    """Units with this share of all elements, evenly spread; a unit is taken when at least half of it is due. groups:
    the elements and the units of each."""
    taken, due = set(), 0.0
    for numel, units in groups:
        due += share * numel
        if due >= numel / 2:
            taken |= units
            due -= numel
    return taken
