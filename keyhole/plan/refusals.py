"""What a budget that is too small is told: the least that is enough, what fills it, and what would need less.
(And one that was planned for another method: that it may be too small.)

Three cases. A method that streams has a minimum, with everything streamed. One with placement=resident has another,
with nothing streamed. A baseline (adamw, sgd, lora, galore) keeps all weights on the device, and what else it needs is
not planned, so only the weights are named. Advice names settings that exist for the method and can still be lowered.
"""

import warnings
from dataclasses import fields
from typing import Any

from keyhole.config.fields import section_of
from keyhole.errors import UserError
from keyhole.machine.sizes import about, enough
from keyhole.model.backward import memory as gradient
from keyhole.model.forward.memory import Workload

PASSES_ALONE = ("eval", "chat", "replay")  # no settings of training
PLANNED = ("zo", *gradient.METHODS)  # methods whose bytes on the device are known


def parts(device_bytes: Any, method: str) -> str:
    """What fills the device, without what is empty."""
    names = {} if method == "zo" else {"perturbed": "buffers"}
    found = {names.get(field.name, field.name): getattr(device_bytes, field.name) for field in fields(device_bytes)}
    return ", ".join(f"{name}: {about(count)}" for name, count in found.items() if count)


def below_minimum(budget: int, smallest: Any, work: Workload, weights_bytes: int, itemsize: int) -> UserError:
    """Even with everything streamed that can be."""
    if work.method not in (*PLANNED, *PASSES_ALONE):
        return UserError(
            f"gpu_memory: {about(budget)} cannot hold the weights, {about(weights_bytes)}, and {work.method} cannot "
            f"stream them. Raise gpu_memory, or use method=zo, lomo, adam-offload or lsp."
        )
    passes = f"{work.passes} pass{'es' if work.passes > 1 else ''}"
    size = "" if work.method in PASSES_ALONE else f" at {work.tokens} tokens a pass and {passes}"
    return UserError(
        f"gpu_memory: {about(budget)} is below the minimum of {enough(smallest.total)} for this model and "
        f"{work.method}{size} ({parts(smallest, work.method)}). Raise gpu_memory{_advice(work, itemsize)}."
        + (" Compiled blocks are not cut: zo.compile=false needs less." if work.whole_blocks else "")
    )


def resident_too_large(budget: int, needed: Any, work: Workload, streams: bool) -> UserError:
    """placement=resident in a budget that cannot hold it."""
    return UserError(
        f"gpu_memory: {about(budget)} is below the {enough(needed.total)} that placement=resident needs for this model "
        f"and {work.method} at {work.tokens} tokens a pass ({parts(needed, work.method)}). Raise gpu_memory"
        + (", or use placement=auto, which streams what does not fit." if streams else ".")
    )


def warn_of_another_plan(placed: Any, method: str) -> None:
    """When a method is made on a model whose budget was planned for another: it may need more beside the weights."""
    if placed is None or placed.budget_bytes is None or method not in gradient.METHODS or placed.work.method == method:
        return
    warnings.warn(
        f"gpu_memory: {about(placed.budget_bytes)} was planned for {placed.work.method}, and may not be enough for "
        f'{method}; load with workload=keyhole.Workload("{method}", tokens=...), the tokens of a batch',
        stacklevel=4,
    )


def _advice(work: Workload, itemsize: int) -> str:
    """`, or lower ..., or set ...`"""
    if work.method in PASSES_ALONE:
        return ", or use dtype=bfloat16" if itemsize > 2 and work.method != "replay" else ""
    passes_a_batch = 2 * work.directions if work.method == "zo" else 1
    lower = ["batch_size", "max_length"]
    lower += ["gradient_accumulation_steps"] if work.passes > passes_a_batch else []
    lower += ["zo.directions"] if work.method == "zo" and work.directions > 1 else []
    text = f", or lower {', '.join(lower[:-1])} or {lower[-1]}"
    if work.method in gradient.METHODS and work.kept != "host":
        text += f", or set {section_of(work.method)}.activations=host"
    return text
