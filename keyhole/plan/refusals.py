"""Messages for a budget that is too small: the minimum, what fills it, and which settings would need less.
(And a warning for a budget that was planned for another method and may be too small.)

There are three cases. A method that streams has its minimum with everything streamed. With placement=resident the
minimum is that with nothing streamed. A baseline (adamw, sgd, galore) keeps all weights on the device, and its
other needs are not planned, so only the weights are named. Advice names settings that exist for the method and can
still be lowered.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from keyhole.errors import UserError, warn
from keyhole.machine.sizes import about, enough
from keyhole.methods import METHODS, streaming_methods
from keyhole.methods.workload import DeviceBytes, Workload


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


def trained_below_adapters(adapter: Path, method: str) -> UserError:
    """A method was created on a model with fixed adapters."""
    return UserError(
        f"model: {adapter} holds adapters on top of these weights, and {method} would train below them. Go on with the "
        "run that made them (--resume), merge them (PeftModel.from_pretrained(model, adapter).merge_and_unload()), "
        "or leave them out: keyhole.load(..., adapter=False)"
    )


def warn_of_a_larger_batch(budget: int | None, work: Workload, tokens: int) -> None:
    """Warns that the budget was planned for smaller batches."""
    warn(
        f"gpu_memory: {about(budget or 0)} was planned for {work.tokens} tokens per pass, and a batch has {tokens}: it "
        f'may need more; load with workload=keyhole.Workload("{work.method}", tokens={tokens}), or give KeyholeTrainer '
        "the max_length of the data",
    )


def warn_of_another_plan(budget: int, planned: str, method: str) -> None:
    """Warns that the budget was planned for another method than the one that is created now."""
    warn(
        f"gpu_memory: {about(budget)} was planned for {planned}, and may not be enough for "
        f'{method}; load with workload=keyhole.Workload("{method}", tokens=...), the tokens of a batch',
    )
