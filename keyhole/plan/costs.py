"""The bytes of a set of streamed units, on the device and on the host, for one method and one workload.

Which units are streamed is tried out (fit.py): `Costs` answers for each set what a step would need. Most of it is the
method's own formula (`device_bytes` of its row, methods/traits.py); here is what several ranks add to it:

    sharded units     every rank keeps 1 / ranks of a unit's elements, and gathers the rest into slots as if the unit
                      were streamed; gradients are exchanged unit by unit in float32, with a send and a receive buffer
    shared homes      ranks on one machine that all have all weights keep one copy of streamed blocks between them

The properties say how the model may be cut for this method: into rows of a matrix, into experts, or not at all.
"""

from dataclasses import dataclass, replace

from keyhole.methods.memory import forward_bytes
from keyhole.methods.traits import Traits
from keyhole.methods.workload import DeviceBytes, Room, Workload
from keyhole.model.backward import memory as backward
from keyhole.model.forward.memory import SLOT_COUNT, host_bytes
from keyhole.model.structure.layout import Layout
from keyhole.offload.shards import part_numel


@dataclass(frozen=True)
class Costs:
    """Plans the bytes for a set of streamed units. row: None for forward passes only (evaluation, chat, replay)."""

    work: Workload
    room: Room
    row: Traits | None

    def of(self, layout: Layout, streamed: set[int]) -> DeviceBytes:
        plan = forward_bytes if self.row is None else self.row.planned_bytes
        cut = self.cut(layout)
        if not cut:
            return plan(layout, streamed, self.work, self.room)
        # sharded units are gathered into slots, wherever their shards are; gradients of a block are kept side by side,
        # and at most one unit of them is exchanged at a time in float32, with a send and a receive buffer
        found, formats = plan(layout, streamed | set(cut), self.work, self.room), self.room.formats
        assert isinstance(found, backward.ReverseBytes)
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
        if self.room.formats.packs or sharded:
            return False
        return self.row is None or (self.work.settings or self.row.settings()).by_expert

    @property
    def keeps_blocks_whole(self) -> bool:
        return self.row is not None and (self.work.settings or self.row.settings()).whole_blocks
