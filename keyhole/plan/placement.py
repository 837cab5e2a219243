"""Where a model lives, and why: what `placement` and `gpu_memory` decide.

    resident   every unit on the device
    stream     all but the common unit, and embedding and head if both take at most fit.TABLES_BYTES, are streamed;
               with a budget, as many units as it has room for stay on the device
    auto       resident if everything fits the budget (default: 95 % of the free memory), otherwise like stream

The cut into units, and the units that stay, are found in fit.py. This file reads the
budget, refuses what fits neither device nor host before any weight is read (with the changes that would make
it fit, advice.py), and says what was decided, one line per decision, for the start block.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import gt
from pathlib import Path

import torch
from torch import nn

from keyhole.errors import UserError, listed, warn
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.host import host_memory, host_sum
from keyhole.machine.probe import workspace_bytes
from keyhole.machine.settings import memory_limit
from keyhole.machine.sizes import GIB, MIB, Bytes, about
from keyhole.methods import METHODS
from keyhole.methods.settings import MethodSettings
from keyhole.methods.work import check_host_memory
from keyhole.methods.workload import DeviceBytes, Room, Workload
from keyhole.model.backward.memory import ReverseBytes, input_bytes
from keyhole.model.forward.memory import evaluation_bytes, host_bytes
from keyhole.model.structure.block_counts import block_counts
from keyhole.model.structure.find import STACK_NUMEL, TILE_NUMEL, stacks_outside
from keyhole.model.structure.layout import Layout, find_layout
from keyhole.model.structure.reach import is_unreached
from keyhole.model.weights.format import Wire
from keyhole.plan.advice import said
from keyhole.plan.dtype import check_trainable
from keyhole.plan.fit import UNIT_BYTES, Costs, DoesNotFit, fit, parts, split, too_small

KEPT = {"host": 0, "auto": 0, "block": 1, "none": 2}  # `activations` by the memory that is planned for them
USABLE = 0.95  # share of the device's memory, if no budget is given
SLACK_BYTES = GIB  # host memory for Python, PyTorch and the CUDA driver


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
    limit_bytes: int | None = None  # device memory that a method may fill with state
    adapter: Path | None = None  # fixed adapters that were loaded with the model
    reasons: list[str] = field(default_factory=list)
    warned: bool = False  # of a step that is larger than planned
    step: Workload | None = None  # the last one, as it was
    pass_tokens: int | None = None  # a longer pass is split, if its rows can be parted
    parks: bool = False  # passes wait in host memory between blocks
    splits: int = 1  # passes of a micro-batch of the planned size
    is_for_another_method: bool = False  # a method was made for which the budget was not planned

    def evaluation_passes(self, layout: Layout, most: int) -> int:
        """How many batches of the planned size may go through the model together, in the memory that is free after a
        step; at most `most`. Too few batches per sweep cost time; too many would end the run."""
        limit = self.budget_bytes if self.budget_bytes is not None else self.limit_bytes
        if limit is None or not self.streamed:
            return most if self.streamed else 1
        free = self.device_bytes.during_a_step + max(0, limit - self.device_bytes.total)
        tokens, formats, workspace = self.work.tokens, self.formats, self.workspace_bytes
        needs = partial(evaluation_bytes, layout, tokens=tokens, formats=formats, workspace_bytes=workspace)
        return next((n for n in range(most, 1, -1) if needs(passes=n * self.splits) <= free), 1)

    @property
    def input_bytes(self) -> int | None:
        """Room on the device for inputs of blocks between forward and backward pass; None: no limit is known."""
        planned, limit = self.device_bytes, self.limit_bytes
        if limit is None or not isinstance(planned, ReverseBytes):
            return None if self.budget_bytes is None else 0
        return planned.kept + (max(0, limit - planned.total) if self.budget_bytes is None else 0)

    def check_method(self, method: str) -> None:
        """When a method is created on the model: refuses fixed adapters and a dtype in which it cannot train, and warns
        if the budget was planned for another method, since this one may need more memory."""
        if self.adapter is not None:
            raise UserError(
                f"model: {self.adapter} holds adapters on top of these weights, and {method} would train below them. "
                "Go on with the run that made them (--resume), merge them (PeftModel.from_pretrained(model, "
                "adapter).merge_and_unload()), or leave them out: keyhole.load(..., adapter=False)"
            )
        check_trainable(self.formats.dtype, method)
        if self.budget_bytes is not None and self.work.method != method and METHODS[method].sweep == "reverse":
            self.is_for_another_method = True
            warn(
                f"gpu_memory: {about(self.budget_bytes)} was planned for {self.work.method}, and may not be enough for "
                f'{method}; load with workload=keyhole.Workload("{method}", tokens=...), the tokens of a batch',
            )

    def check_step(self, method: str, settings: MethodSettings, shapes: Sequence[Sequence[int]]) -> None:
        """Before a step on micro-batches of these shapes: warns once if it is larger than planned for a budget."""
        tokens, length = max(rows * width for rows, width in shapes), self.work.length and max(w for _, w in shapes)
        self.step = replace(
            self.work,
            method=method,
            tokens=tokens,
            passes=len(shapes) * settings.passes,
            length=length,
            settings=settings,
        )
        larger = self.work.method in METHODS and _exceeds(self.step, self.work)
        if larger and self.budget_bytes is not None and not self.warned:
            self.warned = True
            warn(f"gpu_memory: {self.compared}")

    @property
    def compared(self) -> str:
        """The last step beside the planned one, and what to change; "": nothing was planned for training."""
        work, step = self.work, self.step
        if step is None or work.method not in METHODS:
            return ""
        (planned, told), (own, also_told), row = _sizes(work), _sizes(step), METHODS[step.method]
        budget = "this model" if self.budget_bytes is None else about(self.budget_bytes)
        found, most = f"{budget} was planned for {told}, and a step is {also_told}", tuple(map(max, planned, own))
        if not _exceeds(step, work):
            return found
        asked = f'"{step.method}", passes={most[0]}, tokens={most[1]}' + (f", length={most[2]}" if most[2] else "")
        if step.settings is not None and step.settings.keeps != row.settings().keeps:
            asked += f', settings=keyhole.{row.cls.partition(":")[2]}.row.settings(activations="{step.settings.keeps}")'
        return (
            f"{found}: it may need more. Make smaller micro-batches, or load with workload=keyhole.Workload({asked}), "
            "or give KeyholeTrainer the max_length of the data"
        )


def _sizes(work: Workload) -> tuple[tuple[int, ...], str]:
    """What the memory of a step depends on, and the same in words."""
    keeps, length = (work.settings or METHODS[work.method].settings()).keeps, work.length or 0
    words = (f" in rows of {length:,}" if length else "") + (f", activations={keeps}" if keeps else "")
    told = f"{work.method} ({work.passes:,} x {work.tokens:,} tokens{words})"
    return (work.passes, work.tokens, length, KEPT.get(keeps or "", 0)), told


def _exceeds(step: Workload, planned: Workload) -> bool:
    """Whether a step is larger than the planned one: in all, or one of its passes."""
    sizes = ((passes * tokens, tokens, *rest) for passes, tokens, *rest in (_sizes(step)[0], _sizes(planned)[0]))
    return any(map(gt, *sizes))


def place(
    module: nn.Module,
    placement: str,
    gpu_memory: str | int | None,
    formats: Wire,
    device: torch.device,
    work: Workload,
) -> tuple[Layout, Placement]:
    """Cuts the model into units and decides which of them are streamed. Refuses what cannot fit, with the cheapest
    changes that would make it fit."""
    if placement not in ("resident", "stream", "auto"):
        raise UserError(f"placement: {placement!r} is not one of resident, stream, auto")
    budget = limit = _budget(gpu_memory, placement, device)
    if budget is None and device.type == ACCELERATOR:
        limit = int(USABLE * accelerator.get_device_properties(device).total_memory)
    room = Room(formats, workspace_bytes(device), limit)
    costs = Costs(work, room, METHODS.get(work.method))
    whole = find_layout(module)
    if device.type == ACCELERATOR:
        block_counts(module, whole.parts.blocks)  # kept; later a method may have replaced their forward by graphs

    def cut(costs: Costs) -> tuple[Layout, set[int]]:
        layout, streamed = _cut(module, whole, placement, budget, costs, device)
        _check_host(layout, streamed, costs, placement)
        if budget is None and limit is not None and costs.is_planned and costs.of(layout, streamed).total > limit:
            raise too_small(limit, costs.of(layout, streamed), costs.work, streamed=bool(streamed))
        return layout, streamed

    try:
        costs, layout, streamed = split(costs, limit, cut)
    except DoesNotFit as refused:
        fills = placement == "stream" and gpu_memory is not None  # as auto does
        how = "auto" if fills else placement
        raise UserError(f"{refused}{said(module, how, limit, formats, device, work)}") from None
    planned, slots = costs.of(layout, streamed), costs.slot_count(layout) if streamed else 0
    placed = Placement(streamed, slots, planned, costs.work, formats, room.workspace_bytes, budget, limit)
    placed.splits = costs.work.passes // work.passes
    placed.parks = costs.work_of(layout, streamed).parks
    if costs.is_planned and (budget is not None or placed.splits > 1):
        placed.pass_tokens = costs.work.tokens
    placed.reasons = _reasons(module, layout, placed, placement, costs, device)
    return layout, placed


def _cut(
    module: nn.Module, whole: Layout, placement: str, budget: int | None, costs: Costs, device: torch.device
) -> tuple[Layout, set[int]]:
    """The layout, and the units that are streamed. Without a budget the whole device is the budget of what is resident.
    For a baseline only weights, gradients and state are counted, because the rest is not planned."""
    resident, blocks = costs.of(whole, set()), bool(whole.of_kind("block"))
    if placement == "stream" or (placement == "auto" and budget is not None and resident.total > budget):
        if not blocks:
            raise UserError(
                f"placement: {type(module).__name__} has no list of repeated blocks, so there is nothing to stream "
                "unit by unit; use placement=resident"
            )
        return fit(module, costs, budget)
    have = budget
    if budget is None and device.type == ACCELERATOR and costs.row is not None:
        have = accelerator.get_device_properties(device).total_memory
        sure = sum(getattr(resident, part, 0) for part in ("homes", "gradients", "state"))
        if not costs.is_planned and sure > have:
            raise too_small(have, resident, costs.work, streamed=False)
    if have is not None and costs.is_planned and resident.total > have:
        fix = ", or use placement=auto, which streams what does not fit" if blocks else ""
        raise too_small(have, resident, costs.work, streamed=False, fix=fix)
    return whole, set()


def _budget(gpu_memory: str | int | None, placement: str, device: torch.device) -> int | None:
    if gpu_memory is not None:
        try:
            return int(Bytes.parse(gpu_memory))
        except ValueError as error:
            raise UserError(f"gpu_memory: {gpu_memory!r} is not {error}") from error
    if placement == "auto" and device.type == ACCELERATOR:
        return int(USABLE * max(0, min(accelerator.mem_get_info(device)[0], memory_limit(device).left_bytes)))
    return None


def _check_host(layout: Layout, streamed: set[int], costs: Costs, placement: str) -> None:
    """Refuses weights and a method's state that do not fit host memory, before weights are read."""
    needed, available = costs.host_bytes(layout, streamed), host_memory().available_bytes
    if streamed and needed + SLACK_BYTES > available:
        sums = host_sum(needed, SLACK_BYTES, available)
        raise DoesNotFit(
            f"placement: {placement} keeps weights in host memory: {sums}. Free memory, raise gpu_memory so that more "
            "stays on the GPU, or use a 16-bit dtype."
        )
    if costs.row is not None and costs.row.costs.host_state is not None:
        itemsize, work = costs.room.formats.dtype.itemsize, costs.work
        state = costs.row.costs.host_state(layout, streamed, itemsize, work.settings, costs.cut(layout))
        try:
            check_host_memory(*state, needed, work.local_ranks)
        except UserError as error:
            raise DoesNotFit(str(error)) from error


def _reasons(
    module: nn.Module, layout: Layout, placed: Placement, placement: str, costs: Costs, device: torch.device
) -> list[str]:
    formats, blocks = costs.room.formats, layout.of_kind("block")
    cut = len(blocks) // layout.block_count if layout.block_count else 0
    away = host_bytes(layout, placed.streamed, formats)
    total = sum(formats.home_bytes(u) for u in layout.units)
    head = f"{'tied to' if layout.tied else 'apart from'} the embedding, in {len(layout.head_units)} row chunks"
    kind = type(layout.parts.blocks[0]).__name__ if layout.block_count else "none"
    lines = [
        f"units: {layout.block_count} x {kind}"
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
    if layout.parts.tiled_layers:
        lines.append(
            f"row tiles: {layout.parts.tiled_layers} linear layers of more than {TILE_NUMEL >> 20} Mi weights are "
            "computed in tiles of output rows, streamed or resident: the same bits in both, those of the untiled "
            "product within rounding"
        )
    if placed.budget_bytes is not None:
        enforced = "enforced" if device.type == ACCELERATOR else "not enforced on a CPU"
        lines.append(f"budget: {about(placed.budget_bytes)}, {enforced}")
    if placed.splits > 1:
        lines.append(
            f"passes: a micro-batch of {placed.splits * placed.work.tokens:,} tokens passes each block in "
            f"{placed.splits} parts of {placed.work.tokens:,} (micro_batch_size), so that a block's weights are moved "
            "and updated once"
        )
    if device.type != ACCELERATOR or not costs.is_planned:
        return lines
    if isinstance(placed.device_bytes, ReverseBytes) and (waiting := costs.waiting_blocks(layout, placed.streamed)):
        each = input_bytes(layout, placed.work.tokens * placed.work.passes, formats.dtype.itemsize)
        lines.append(
            f"block inputs: of {waiting} of {layout.block_count} blocks in host memory between forward and backward "
            f"pass, {about(waiting * each)}"
        )
    return [*lines, f"planned device peak: {about(placed.device_bytes.total)} ({parts(placed.device_bytes)})"]


def expert_lines(layout: Layout, streamed: set[int], may_cut: bool, element_bytes: int) -> list[str]:
    """A line about layers that are computed expert by expert, and one about large stacks that are not."""
    lines = []
    if layout.experts:
        count = layout.experts[0].count
        how = f"experts: {len(layout.experts)} layers of {count} are computed one expert at a time, streamed or "
        how += "resident: the same bits in both, those of the grouped product within rounding"
        if any(unit.expert is not None and unit.index in streamed for unit in layout.units):
            how += "; only experts that tokens meet cross the link"
        elif streamed and not may_cut:
            how += "; they are moved as whole stacks, since this method, wire or number of ranks needs these"
        lines.append(how)
    whole = [
        t.shape.numel()
        for t in layout.tensors
        if t.block is not None and len(t.shape) == 3 and not t.experts and t.shape.numel() > STACK_NUMEL
    ]
    if whole and streamed:
        lines.append(
            f"experts: {len(whole)} stacks of up to {about(max(whole) * element_bytes)} are moved whole: this model "
            "does not compute them expert by expert"
        )
    return lines


def outside_lines(module: nn.Module, layout: Layout) -> list[str]:
    """A line for each stack outside of the blocks, and one for weights that are frozen because the forward pass on
    tokens does not use them."""
    total = sum(tensor.shape.numel() for tensor in layout.tensors)
    lines = [
        f"outside of the blocks: {name}, {len(stack)} x {type(stack[0]).__name__}, {numel / total:.1%} of the "
        "parameters: on the device all the time, not streamed"
        for name, (stack, numel) in stacks_outside(module, layout.parts.blocks).items()
    ]
    frozen = [tensor for tensor in layout.tensors if is_unreached(tensor.param)]
    if frozen:
        numel = sum(tensor.shape.numel() for tensor in frozen)
        lines.append(
            f"frozen: {numel:,} parameters ({numel / total:.1%}) that a batch of tokens never reaches: "
            + listed(
                _outermost({t.name for t in frozen}, {t.name for t in layout.tensors if not is_unreached(t.param)})
            )
        )
    if untried := getattr(module, "keyhole_untried", ""):
        lines.append(f"all parameters count as used: a forward without weights, which would tell, fails ({untried})")
    return lines


def _outermost(names: set[str], others: set[str]) -> list[str]:
    """The outermost modules that hold names and none of the others; `*` stands for numbers."""
    shared = {name[:end] for name in others for end in range(len(name)) if name[end] == "."}
    parts: dict[str, None] = {}
    for name in sorted(names):
        steps = name.split(".")
        above = [".".join(steps[:n]) for n in range(1, len(steps) + 1)]
        own = next((part for part in above if part not in shared), name)
        parts[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", own)] = None
    return list(parts)
