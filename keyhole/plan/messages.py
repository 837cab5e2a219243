"""What a placement says. For a budget that is too small: the minimum, what fills it, and which settings would need
less.

There are three cases. A method that streams has its minimum with everything streamed. With placement=resident the
minimum is that with nothing streamed. A baseline (adamw, sgd, galore) keeps all weights on the device, and its
other needs are not planned, so only the weights are named. Advice names settings that exist for the method and can
still be lowered.

The lines of the start block about a model's cut are here too: how experts are moved, and what stays outside of the
blocks. Stacks outside of them belong to the spine, which is always on the device, so a model that consists mostly of
such stacks cannot be streamed.
"""

import re
from dataclasses import fields
from typing import Any

from torch import nn

from keyhole.errors import UserError
from keyhole.machine.sizes import about, enough
from keyhole.methods import METHODS, streaming_methods
from keyhole.methods.workload import DeviceBytes, Workload
from keyhole.model.structure.find import STACK_NUMEL
from keyhole.model.structure.layout import Layout
from keyhole.model.structure.reach import is_unreached

MOST_NAMED = 4


class DoesNotFit(UserError):
    """The memory is too small for the run; placement.py adds the changes that would fit."""


def parts(device_bytes: Any, trains: bool = True) -> str:
    """The parts that fill the device, without empty ones. Without training, there are no perturbed weights."""
    names = {} if trains else {"perturbed": "buffers"}
    found = {names.get(field.name, field.name): getattr(device_bytes, field.name) for field in fields(device_bytes)}
    return ", ".join(f"{name}: {about(count)}" for name, count in found.items() if count)


def below_minimum(budget: int, smallest: DeviceBytes, work: Workload, weights_bytes: int, itemsize: int) -> DoesNotFit:
    """The budget is too small even with everything streamed that can be."""
    row = METHODS.get(work.method)
    if row is None:  # forward passes only: there are no settings of training
        fix = ", or use dtype=bfloat16" if itemsize > 2 and work.method != "replay" else ""
        return DoesNotFit(
            f"gpu_memory: {about(budget)} is below the minimum of {enough(smallest.total)} for this model and "
            f"{work.method} ({parts(smallest, trains=False)}). Raise gpu_memory{fix}."
        )
    if not row.streams:
        return DoesNotFit(
            f"gpu_memory: {about(budget)} cannot hold the weights, {about(weights_bytes)}, and {work.method} cannot "
            f"stream them. Raise gpu_memory, or use method={streaming_methods()}."
        )
    own = work.settings or row.settings()
    passes = f"{work.passes} pass{'es' if work.passes > 1 else ''}"
    whole = " Compiled blocks are not cut: compile=false needs less." if own.whole_blocks else ""
    lower = ["batch_size", "max_length"]
    lower += ["gradient_accumulation_steps"] if work.passes > own.passes else []
    lower += own.advice.lower
    change = "".join(f", or set {setting}" for setting in own.advice.change)
    return DoesNotFit(
        f"gpu_memory: {about(budget)} is below the minimum of {enough(smallest.total)} for this model and "
        f"{work.method} at {work.tokens} tokens per pass and {passes} ({parts(smallest)}). Raise gpu_memory, or lower "
        f"{', '.join(lower[:-1])} or {lower[-1]}{change}.{whole}"
    )


def resident_too_large(budget: int, needed: DeviceBytes, work: Workload, streams: bool) -> DoesNotFit:
    """placement=resident in a budget that cannot hold it."""
    return DoesNotFit(
        f"gpu_memory: {about(budget)} is below the {enough(needed.total)} that placement=resident needs for this model "
        f"and {work.method} at {work.tokens} tokens per pass ({parts(needed)}). Raise gpu_memory"
        + (", or use placement=auto, which streams what does not fit." if streams else ".")
    )


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
        f"outside of the blocks: {stack.name}, {stack.count} x {stack.kind}, {stack.numel / total:.1%} of the "
        "parameters: on the device all the time, not streamed"
        for stack in layout.stacks_outside
    ]
    frozen = [tensor for tensor in layout.tensors if is_unreached(tensor.param)]
    if frozen:
        numel = sum(tensor.shape.numel() for tensor in frozen)
        lines.append(
            f"frozen: {numel:,} parameters ({numel / total:.1%}) that a batch of tokens never reaches: "
            + _parts({t.name for t in frozen}, {t.name for t in layout.tensors if not is_unreached(t.param)})
        )
    if untried := getattr(module, "keyhole_untried", ""):
        lines.append(f"all parameters count as used: a forward without weights, which would tell, fails ({untried})")
    return lines


def _parts(frozen: set[str], reached: set[str]) -> str:
    """The outermost modules with only frozen parameters; `*` stands for numbers."""
    prefixes = {name[:end] for name in reached for end in range(len(name)) if name[end] == "."}
    parts: dict[str, None] = {}
    for name in sorted(frozen):
        steps = name.split(".")
        outermost = next(
            (".".join(steps[:n]) for n in range(1, len(steps)) if ".".join(steps[:n]) not in prefixes), name
        )
        parts[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", outermost)] = None
    named = list(parts)
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return ", ".join(named[:MOST_NAMED]) + more
