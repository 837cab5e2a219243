"""Turns the arguments of `keyhole plan` into a question to the planner, and predicts the steps of a run.

The arguments have been checked before (plan_request.py). The machine is, in this order:

    --machine NAME   an estimate (plan/seconds.py)
    here             if there is a GPU: measured once and kept (plan/measure.py)
    --gpu SIZE       without a GPU here: the smallest known machine that has this much GPU memory
    here             the CPU alone
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from keyhole.config.fields import own_settings
from keyhole.loading import choose_device
from keyhole.loading.prepare import find_source
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.host import host_memory
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import GIB, about
from keyhole.machine.text import counted
from keyhole.methods import METHODS
from keyhole.methods.work import experts_share
from keyhole.methods.workload import Room
from keyhole.model.forward.memory import host_bytes
from keyhole.model.model import Model
from keyhole.plan.dtype import AUTO, NAMES
from keyhole.plan.fit import Costs
from keyhole.plan.measure import known, rates_of
from keyhole.plan.placement import USABLE
from keyhole.plan.seconds import PROFILES, step_seconds, trust
from keyhole.plan.table import Question, process_bytes
from keyhole.report.story import Planned
from keyhole.training.plan_request import DEFAULT, PlanRequest

RESERVE_BYTES = GIB  # left free on a card for the CUDA context and the desktop


def ask(request: PlanRequest, say: Callable[[str], None] = lambda text: None) -> tuple[Question, list[str]]:
    """Reads the model's config, and determines the machine: the question, and the lines to print about it."""
    config = request.config
    batch, length = config.batch_size, config.max_length or DEFAULT["max_length"]
    source = find_source(config.model, download=False)
    rates, device, gpu_bytes, ram_bytes = _machine(request, say)
    outline = source.outline(config.dtype or AUTO, device, config.method, config.freeze, config.expert_units)
    choice, module = outline.choice, outline.module
    question = Question(
        module=module,
        dtype=choice.dtype,
        rates=rates,
        gpu_bytes=gpu_bytes,
        host_bytes=ram_bytes,
        batch=batch,
        length=length,
        accumulation=config.gradient_accumulation_steps,
        steps=request.steps or config.max_steps or DEFAULT["max_steps"],
        clips=config.max_grad_norm is not None,
        keeps=max(2, config.save_total_limit or 0),
        settings={
            row.name: replace(own_settings(config, row), max_grad_norm=None, weight_decay=0.0)
            for row in METHODS.values()  # clipping is the question's, and nothing depends on decay
        },
        chooses=config.loss == "candidates",
    )
    room = f"{about(gpu_bytes)} of GPU memory and " if gpu_bytes is not None else ""
    samples, count = f"{counted(batch, 'sample')} of {counted(length, 'token')}", question.accumulation
    numel = sum(p.numel() for p in module.parameters())
    lines = [
        f"model: {type(module).__name__}, {numel:,} parameters, {NAMES[choice.dtype]} ({choice.reason})",
        *rates.lines(),
        trust(rates, numel),
        f"room: {room}{about(ram_bytes)} of host memory",
        f"step: {samples}" if count == 1 else f"step: {count:,} micro-batches, each {samples}",
    ]
    return question, lines


def _machine(request: PlanRequest, say: Callable[[str], None]) -> tuple[Rates, torch.device | None, int | None, int]:
    """The machine's rates, the device if it is this machine, and the GPU and host memory that may be used."""
    rates, gpu_bytes, ram_bytes = request.machine, request.gpu_bytes, host_memory().available_bytes
    device = None if isinstance(rates, Rates) else choose_device(request.config.device)
    if rates is None and device is not None and device.type == "cpu" and gpu_bytes is not None:
        large = [key for key, each in PROFILES.items() if (each.gpu_bytes or 0) >= gpu_bytes]
        name, device = large[0] if large else list(PROFILES)[-1], None
        rates = PROFILES[name]
        why = f"the smallest that has {about(gpu_bytes)}" if large else "the largest that is known"
        say(f"there is no GPU here: planned for --machine {name}, {why}")
    if device is not None:
        rates = rates_of(device, request.measure, say)
        free = int(USABLE * accelerator.mem_get_info(device)[0]) if device.type == ACCELERATOR else None
        gpu_bytes = None if free is None else gpu_bytes or free
    assert isinstance(rates, Rates)
    if device is None:
        gpu_bytes = (rates.gpu_bytes or 0) - RESERVE_BYTES if gpu_bytes is None else gpu_bytes
        ram_bytes = int(USABLE * rates.host_bytes)
    if request.ram_bytes is not None:
        ram_bytes = request.ram_bytes
        rates = replace(rates, host_bytes=ram_bytes)
    if request.link is not None:
        rates = rates.with_link(request.link)
    return rates, device, gpu_bytes, ram_bytes


def planned(model: Model, method: str, tokens: float | None = None) -> Planned:
    """What is planned for the actual placement: bytes on the device by part, host bytes, and seconds of a step with
    this number of tokens (None: the largest step), if the machine was measured or has a profile."""
    made, row, placed, on_gpu = Planned(), METHODS[method], model.placed, model.device.type == ACCELERATOR
    if placed is None or not row.streams:
        return made
    if on_gpu:
        made.device_bytes = placed.device_bytes.total
        made.parts = {name: count for name, count in asdict(placed.device_bytes).items() if count}
    rates, settings, formats, streamed = known(model.device), placed.work.settings, model.formats, model.engine.streamed
    micro = max(1, placed.work.passes // (settings or row.settings()).passes)
    each = placed.work.tokens if tokens is None else min(placed.work.tokens, max(1, round(tokens / micro)))
    work = replace(placed.work, method=method, tokens=each, experts=experts_share(model.config))
    room = Room(formats, placed.workspace_bytes, placed.limit_bytes)
    work = Costs(work, room, row).work_of(model.layout, streamed)
    asked = row.planned_work(model.layout, streamed, work, room, rates or next(iter(PROFILES.values())))
    host = host_bytes(model.layout, streamed, formats) + asked.host_bytes + process_bytes(row, settings, on_gpu)
    made.host_bytes = int(host) + (0 if on_gpu else placed.device_bytes.total)  # the CPU is the device
    if rates is not None:
        step = step_seconds(asked, rates, rows=each, itemsize=formats.dtype.itemsize)
        made.seconds = {"total": step.total, "compute": step.compute, "link": step.link, "CPU": step.cpu}
        made.bound_by = step.bound_by
        made.source = (
            "rates measured here" if rates.measured else "estimated rates; `keyhole plan` measures this machine"
        )
    return made
