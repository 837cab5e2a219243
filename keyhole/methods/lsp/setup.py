"""LSP's decisions before its first step: which tensors are projected, where Adam's moments live, the start block.

    matrices of blocks with a side longer than d     projected
    others                                           plain Adam (others: adam), or not trained at all (frozen):
        vectors, embeddings, head, stacks of experts, matrices with both sides <= d (these are trained either way:
        for them the subspace is the whole space)

Bytes, and which units' moments are on the device: methods/lsp/memory.py.
"""

from dataclasses import replace
from typing import Any

from keyhole.errors import UserError
from keyhole.machine.sizes import GIB
from keyhole.methods.lsp.learn import Learning
from keyhole.methods.lsp.memory import LSPBytes, Numbers, choose_units, group_of
from keyhole.methods.lsp.target import Target, Targets, is_plain
from keyhole.methods.lsp.update import SubspaceUpdates
from keyhole.model.backward.sink import chunk
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit


def find_targets(model: Model, learning: Learning, kind: str, others: str) -> Targets:
    """All trained tensors, by unit. Freezes the rest."""
    found: Targets = {}
    for unit in model.layout.units:
        tensors = [t for t in _tensors(unit) if t.param.requires_grad]
        members = [Target(tensor, unit.index, kind, learning.rule.scaled) for tensor in tensors]
        for target in list(members):
            matrix = unit.kind == "block" and len(target.tensor.shape) == 2
            if matrix and not is_plain(target.tensor.shape, learning.d):
                target.p, target.q = learning.draw(target)
                target.rescale()
            elif not matrix and others == "frozen":
                target.tensor.param.requires_grad_(False)
                members.remove(target)
        if members:
            found[unit.index] = members
    if not any(target.p is not None or len(target.tensor.shape) == 2 for group in found.values() for target in group):
        raise UserError("lsp: no matrix of a block is trained; unfreeze some, or use method=adamw")
    return found


def _tensors(unit: Unit) -> list[Any]:
    return [chunk(unit)] if unit.rows is not None else unit.tensors


def place_moments(model: Model, targets: Targets, optimizer_on: str, clips: bool) -> set[int]:
    """Units whose moments are on the device: by the setting, or as the budget allows. Updates the plan."""
    groups = {unit: group_of(model.layout.units[unit]) for unit in targets}
    numels = {unit: sum(target.numel for target in members) for unit, members in targets.items()}
    numbers = Numbers(numels, groups, ranks=model.ranks.size if model.sharded else 1)
    if model.placed is None:
        return choose_units(numbers, optimizer_on, clips, None)
    planned, limit = model.placed.device_bytes, model.placed.limit_bytes
    taken = planned.without_state if isinstance(planned, LSPBytes) else planned.total
    numbers = replace(numbers, projector_bytes=_projector_bytes(targets))
    chosen = choose_units(numbers, optimizer_on, clips, None if limit is None else limit - taken)
    if model.sharded:  # all ranks must update a unit at the same time
        chosen = chosen.intersection(*model.ranks.objects(chosen))
    if isinstance(planned, LSPBytes):
        moments, buffers = numbers.state(chosen, clips)
        model.placed.device_bytes = replace(planned, moments=moments, buffers=buffers)
    return chosen


def _projector_bytes(targets: Targets) -> int:
    found = [target for members in targets.values() for target in members if target.p is not None]
    return sum(4 * side.values_Rr.numel() for target in found for side in target.pair)


def describe_targets(targets: list[Target], learning: Learning, updates: SubspaceUpdates) -> list[str]:
    """Lines for the start block: the decisions made."""
    compressed = [target for target in targets if target.p is not None]
    plain = [target for target in targets if target.p is None]
    before = sum(target.tensor.shape.numel() for target in compressed)
    after = sum(target.numel for target in compressed)
    d, kind = learning.d, compressed[0].kind if compressed else "none"
    scale = "scaled to AdamW's rates" if learning.rule.scaled else "not scaled, as in the paper"
    lines = [
        f"lsp: {len(compressed)} matrices through ({d}, {learning.r})-sparse projectors ({kind}): {before:,} weights "
        f"seen as {after:,}; steps {scale}; {_describe_moments(updates)}"
    ]
    clamped = [target for target in compressed if min(target.tensor.shape) <= d]
    clamped += [target for target in plain if target.tensor.block is not None and len(target.tensor.shape) == 2]
    if clamped:
        lines.append(f"lsp: d = {d} is more than a side of {len(clamped)} matrices has: nothing is lost there")
    stacks = [target for target in plain if len(target.tensor.shape) > 2]
    if stacks:
        lines.append(f"lsp: {len(stacks)} stacks of matrices (experts) are trained by plain Adam, not compressed")
    frozen = [t.name for t in updates.model.layout.tensors if not t.param.requires_grad]
    lines += [f"lsp: not trained: {_names(frozen)}"] if frozen else []
    return lines + ([f"lsp: by plain Adam: {_names([target.name for target in plain])}"] if plain else [])


def _describe_moments(updates: SubspaceUpdates) -> str:
    on_device = sum(updates.device.lengths.values())
    on_host = 0 if updates.host is None else sum(updates.host.lengths.values())
    places = [f"{8 * on_device / GIB:.2f} GiB in device memory"] if on_device else []
    places += [f"{8 * on_host / GIB:.2f} GiB in host memory, updated by the CPU"] if on_host else []
    units = updates.model.layout.units
    first = [units[unit].name for unit in updates.lengths if unit not in updates.device.lengths]
    return f"Adam's moments: {' and '.join(places)}" + (f" (from {first[0]} on)" if on_device and on_host else "")


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
