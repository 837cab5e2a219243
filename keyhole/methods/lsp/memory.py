"""Bytes of LSP's optimizer on the device beside the weights, and which units have their moments there.

The optimizer sees d_P d_Q numbers of a matrix of a block, and all elements of any other tensor. Bytes on the device:

    moments      8 per number if they are on the device (12 if gradients wait there to be clipped), else none
    buffers      the gradient of one block, or one chunk of a table, in fp32; twice if some are copied to the host, and
                 then SLOTS steps of one unit that are being uploaded
    projectors   r numbers per row of both sides of a matrix, in fp32
    learning     the fit of one matrix [m, n] while its block is on the device, of T tokens in each of s slices, W its
                 longer side; all in fp32. blocks: one slice of dY and X twice, [T, T], and three Gram matrices of
                 r W / d rows; or, as the bias is measured, [d, W] twice and 24 d^2. free, which is fitted dense and by
                 autograd: all slices, [d, W] ten times and 40 d^2. Both begin with norms: a slice and three of [T, T]

Llama-7B, d = 2048: 1.19 G numbers (blocks 0.93 G, embedding and head 0.13 G each), 8.89 GiB of moments.

Which units, if not all fit? The GPU does not wait for a unit on the host if its update ends before the next forward
pass needs its weights. With f and b seconds for a layer's forward and backward, the time between its gradient and that
use is

    embedding 0      layer k: k (f + b)      head: L (f + b)

so updates of the last layers are the easiest to hide on the host, and those of the embedding cannot be hidden: the
device keeps units in the order of the forward pass. If weights are streamed, the embedding's moments even come before
resident weights of blocks. 8 bytes per number displace as many bytes of weights, which then go up twice and down once
per step: at most 16 / link seconds, and none if the device is the bound. On the host a number costs 8 / link + 1 / adam
seconds that nothing hides (adam: numbers that the CPU updates per second). With 25 GB/s and 2.5 G/s that is 0.64 ns
against 0.72; on a host with a slower CPU the difference is larger. The host needs u seconds per layer; if it has the
layers from g on, they are done in time if for all k

    (k - g + 1) u + down + up <= k (f + b)

"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from keyhole.machine.rates import Rates
from keyhole.methods.lsp.adam import SLOTS
from keyhole.methods.lsp.target import Targets
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.methods.work import home_bytes, reverse_bytes, reverse_work, trained_numel, update_launches
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.model.backward.memory import ReverseBytes
from keyhole.model.forward.memory import ALLOCATOR_SLACK, FRAGMENTATION
from keyhole.model.model import Model
from keyhole.model.structure.layout import Layout, Unit


@dataclass(frozen=True)
class LSPBytes(ReverseBytes):
    """The parts of the device peak. State that is allocated once is counted without allocator slack."""

    moments: int = 0
    buffers: int = 0

    @property
    def without_state(self) -> int:
        moving = max(int((self.activations + self.gradients) * FRAGMENTATION), self.logits)
        return self.homes + self.slots + int((self.kept + moving + self.workspace) * ALLOCATOR_SLACK)

    @property
    def total(self) -> int:
        return self.without_state + self.moments + self.buffers


@dataclass(frozen=True)
class Numbers:
    """The number of numbers that the optimizer sees, by unit; groups of units; bytes of projectors."""

    of: dict[int, int]
    groups: dict[int, Hashable]
    projector_bytes: int = 0

    @cached_property
    def largest_group(self) -> int:
        """Numbers of the largest group of units."""
        sizes = Counter[Hashable]()
        for unit, numel in self.of.items():
            sizes[self.groups[unit]] += numel
        return max(sizes.values(), default=0)

    def state(self, on_device: set[int], clips: bool) -> tuple[int, int]:
        """Bytes of moments and of buffers on the device, if these units' moments are there."""
        here = sum(self.of[unit] for unit in on_device)
        away = max((numel for unit, numel in self.of.items() if unit not in on_device), default=0)
        gathered = 4 * self.largest_group * (2 if away else 1)
        return (12 if clips else 8) * here, gathered + 4 * SLOTS * away + self.projector_bytes


AWAY = 54, 36  # launches per group and per unit whose numbers the CPU updates


def group_of(unit: Unit) -> Hashable:
    """The units of a block form one group, a chunk of a table a group of its own."""
    return ("unit", unit.index) if unit.block is None else ("block", unit.block)


def count_numbers(layout: Layout, work: LSPConfig) -> Numbers:
    """The numbers that the optimizer sees, by unit, from shapes alone."""
    numels, projected = {}, 0
    for unit in layout.units:
        total = 0
        for tensor in (t for t in unit.tensors if t.param.requires_grad):
            if unit.kind == "block" and len(tensor.shape) == 2:
                total += torch.Size(min(side, work.d) for side in tensor.shape).numel()
                projected += 4 * work.r * sum(tensor.shape) if max(tensor.shape) > work.d else 0
            elif work.others == "adam":
                shape = tensor.shape if unit.rows is None else (unit.rows[1] - unit.rows[0], *tensor.shape[1:])
                total += torch.Size(shape).numel()
        if total:
            numels[unit.index] = total
    return Numbers(numels, {u.index: group_of(u) for u in layout.units}, projected)


def choose_units(numbers: Numbers, optimizer_on: str, clips: bool, left_bytes: int | None) -> set[int]:
    """Units whose moments are on the device, if it has this many bytes left (None: no limit)."""
    everything = set(numbers.of)
    if optimizer_on != "auto":
        return everything if optimizer_on == "gpu" else set()
    if left_bytes is None or sum(numbers.state(everything, clips)) <= left_bytes:
        return everything
    chosen = set[int]()
    for unit in sorted(numbers.of):  # common, embedding, blocks, head
        if sum(numbers.state(chosen | {unit}, clips)) <= left_bytes:
            chosen.add(unit)
    return chosen


def place_moments(model: Model, targets: Targets, own: LSPConfig) -> set[int]:
    """Units whose moments are on the device: by the setting, or as the budget allows. Updates the plan."""
    optimizer_on, clips = own.optimizer_on, own.max_grad_norm is not None
    groups = {unit: group_of(model.layout.units[unit]) for unit in targets}
    numels = {unit: sum(target.numel for target in members) for unit, members in targets.items()}
    pairs = [target.pair for members in targets.values() for target in members if target.p is not None]
    numbers = Numbers(numels, groups, sum(4 * side.values_Rr.numel() for pair in pairs for side in pair))
    if model.placed is None:
        return choose_units(numbers, optimizer_on, clips, None)
    planned, limit = model.placed.device_bytes, model.placed.limit_bytes
    taken = planned.without_state if isinstance(planned, LSPBytes) else planned.total
    chosen = choose_units(numbers, optimizer_on, clips, None if limit is None else limit - taken)
    if model.ranks.several:  # the same on all of them: a unit gets other bits from the other kernel
        chosen = chosen.intersection(*model.ranks.objects(chosen))
    if isinstance(planned, LSPBytes):
        moments, buffers = numbers.state(chosen, clips)
        model.placed.device_bytes = replace(planned, moments=moments, buffers=buffers)
    return chosen


def _fit_bytes(layout: Layout, tokens: int, own: LSPConfig) -> int:
    """Bytes while the projectors of the largest matrix are fitted."""
    sides = [t.shape for unit in layout.of_kind("block") for t in unit.tensors if len(t.shape) == 2]
    longest = max((max(shape) for shape in sides), default=0)
    if not own.learn or longest <= own.d:
        return 0
    rule = own.rule
    rows, squares = -(-tokens // rule.slices), own.d**2
    part, dense = 4 * rows * max(sum(shape) for shape in sides), 4 * own.d * longest
    norms, grams = part + 12 * rows**2, 12 * own.r * longest**2 // own.d
    if rule.kind == "blocks":
        return max(norms, 2 * part + 4 * rows**2 + grams, 2 * dense + 24 * squares)
    return rule.slices * part + max(norms, 10 * dense + 40 * squares)


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> LSPBytes:
    """The device peak of a step."""
    return _placed(layout, streamed, work, room)[0]


def _placed(
    layout: Layout, streamed: set[int], work: Workload, room: Room
) -> tuple[LSPBytes, Numbers, set[int], LSPConfig]:
    """The device peak, the numbers, and the units whose moments are there: the moments of what the forward pass uses
    first, then weights, then as many other moments as the limit leaves room for. Of a model that is resident the
    weights come first."""
    own = work.settings or LSPConfig()
    assert isinstance(own, LSPConfig)
    compressed = 2 * room.formats.dtype.itemsize * work.tokens * own.d  # dY P and X Q of one matrix
    gradients = max(compressed, _fit_bytes(layout, work.tokens, own))

    def without_moments(away: set[int]) -> LSPBytes:
        return LSPBytes(**(vars(reverse_bytes(layout, away, work, room)) | {"gradients": gradients}))

    found, numbers, limit = without_moments(streamed), count_numbers(layout, own), room.limit_bytes
    left = None if limit is None else limit - found.without_state
    chosen = choose_units(numbers, own.optimizer_on, work.clips, left)
    if streamed and limit is not None and own.optimizer_on == "auto":
        least = without_moments({unit.index for unit in layout.units[1:]}).without_state
        first = _first_units(layout) & set(numbers.of)
        if least + sum(numbers.state(first, work.clips)) <= limit:
            chosen |= first
    moments, buffers = numbers.state(chosen, work.clips)
    return replace(found, moments=moments, buffers=buffers), numbers, chosen, own


def _first_units(layout: Layout) -> set[int]:
    """Units whose gradients come last and whose weights are used first."""
    return {unit.index for unit in layout.units if unit.kind in ("common", "table")}


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step: d_P d_Q numbers of a matrix's gradient are computed instead of all;
    inputs and output gradients are compressed (read once, and r times by gathers); the step is applied to all weights,
    which are read and written; gradients and steps of moments on the host cross the link as fp32. Nothing hides the
    update of the embedding on the host (above)."""
    _, numbers, on_device, own = _placed(layout, streamed, work, room)
    shapes = [t.shape for u in layout.of_kind("block") for t in u.tensors if len(t.shape) == 2]
    seen = sum(torch.Size(min(side, own.d) for side in shape).numel() for shape in shapes)
    share = seen / max(1, sum(shape.numel() for shape in shapes))
    found = reverse_work(layout, streamed, work, room, rates, weight_products=share)
    b, w, sides = room.formats.dtype.itemsize, room.formats.plain.itemsize, sum(map(sum, shapes))
    compressed = b * (1 + own.r) * work.passes * work.tokens * sides
    sent, total = [unit for unit in numbers.of if unit not in on_device], sum(numbers.of.values())
    away = sum(numbers.of[unit] for unit in sent)
    exposed = sum(numbers.of[unit] for unit in _first_units(layout).intersection(sent))
    launches = AWAY[0] * len({numbers.groups[unit] for unit in sent}) + AWAY[1] * len(sent)
    return found.plus(
        launches=launches + (0 if found.recorded else update_launches(layout)),
        touched=compressed + (2 * w + b) * trained_numel(layout) + 24 * (total - away),
        up=4 * away,
        down=home_bytes(layout, streamed, room) + 4 * away,
        adam=away * HOST_SHARE,
        exposed_adam=exposed * HOST_SHARE,
        exposed_bytes=4 * exposed,
        host_bytes=12 * away,
        saved_bytes=8 * total + numbers.projector_bytes,
    )


HOST_SHARE = 24 / 28  # bytes through host memory per number, relative to those per parameter of AdamW with masters


FORMULAS = Formulas(device_bytes, step_work)
