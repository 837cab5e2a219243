"""The question behind `keyhole plan`, from what was typed; and the prediction that a run is compared with.

MODEL is a directory (config.json is enough), a hub id, or demo; CONFIG is a YAML file or a recipe, and brings batches,
length, dtype, steps, and the settings of every method. The machine is, in this order:

    --machine NAME   an estimate (plan/profiles.py)
    here             where there is a GPU: measured once and kept (plan/measure.py)
    --gpu SIZE       without a GPU here: the smallest machine that is known to have so much
    here             the CPU alone
"""

import json
import os
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from keyhole import assets
from keyhole.config import TrainConfig
from keyhole.config.loader import load_config, parse_config
from keyhole.config.recipes import find_config, recipes
from keyhole.errors import UserError
from keyhole.loading import choose_device
from keyhole.machine.host import host_memory
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import GIB, Bytes, about
from keyhole.methods import METHODS
from keyhole.methods.base import Room
from keyhole.methods.work import experts_share
from keyhole.model.model import Model
from keyhole.model.structure.skeleton import build, read_config
from keyhole.model.weights.format import Wire
from keyhole.plan.dtype import AUTO, NAMES, choose_dtype
from keyhole.plan.measure import known, rates_of
from keyhole.plan.profiles import PROFILES, profile
from keyhole.plan.seconds import step_seconds
from keyhole.plan.table import Question

HERE = "here"
RESERVE_BYTES = GIB  # of a card: the CUDA context and the desktop
USABLE = 0.95  # of what is free
DEFAULT = {"batch_size": 4, "max_length": 1024, "max_steps": 1000}


@dataclass(frozen=True)
class Asked:
    """What was typed."""

    model: str
    overrides: Sequence[str] = ()
    gpu: str | None = None
    ram: str | None = None
    link: str | None = None
    tokens: str | None = None
    steps: int | None = None
    machine: str | None = None
    measure: bool = False


@dataclass(frozen=True)
class Found:
    """The question, what to say of it, and the row that the config asks for (None: none in particular)."""

    question: Question
    title: str
    lines: list[str]
    method: str | None = None
    placement: str | None = None
    wire: str | None = None


def ask(asked: Asked, say: Callable[[str], None] = lambda text: None) -> Found:
    """Reads config and model, and finds out about the machine."""
    config, is_config = _config(asked)
    rates, device, gpu_bytes, ram_bytes = _machine(asked, config, say)
    batch, length = _tokens(asked.tokens, config)
    hf_config = read_config(config.model)
    named = is_config or any(word.startswith("method=") for word in asked.overrides)
    choice = choose_dtype(config.dtype or AUTO, hf_config, device, config.method)
    module = build(hf_config, choice.dtype)
    question = Question(
        module=module,
        dtype=choice.dtype,
        rates=rates,
        gpu_bytes=gpu_bytes,
        host_bytes=ram_bytes,
        batch=batch,
        length=length,
        accumulation=config.gradient_accumulation_steps,
        steps=asked.steps or config.max_steps or DEFAULT["max_steps"],
        clips=config.max_grad_norm is not None,
        keeps=config.save_total_limit or 2,
        settings={row.name: getattr(config, row.section) for row in METHODS.values()},
    )
    numel = sum(p.numel() for p in module.parameters())
    room = f"{about(gpu_bytes)} of GPU memory and " if gpu_bytes is not None else ""
    lines = [
        f"model: {type(module).__name__}, {numel:,} parameters, {NAMES[choice.dtype]} ({choice.reason})",
        *rates.lines(),
        f"room: {room}{about(ram_bytes)} of host memory",
        f"step: {question.accumulation} x {batch} x {length} tokens",
    ]
    title = f"{os.path.basename(os.path.normpath(asked.model))} on {rates.name}"
    wanted = (config.method, config.placement, config.wire) if named else (None, None, None)
    return Found(question, title, lines, *wanted)


def _config(asked: Asked) -> tuple[TrainConfig, bool]:
    """The config, and whether it was one that was named (else it is made around the model)."""
    named = asked.model
    is_file = os.path.isfile(named)
    if (is_file and not named.endswith(".json")) or named.removesuffix(".yaml") in recipes():
        return load_config(find_config(named)[0], asked.overrides)[0], True
    if is_file:  # a config.json itself
        named = os.path.dirname(os.path.abspath(named))
    model = assets.locate(os.path.expanduser(named), assets.MODEL)
    method = next(row.name for row in METHODS.values() if row.sweep == "reverse")
    made = {"model": model, "method": method, "output_dir": "not-written", "train_data": "not-read", **DEFAULT}
    return parse_config(json.dumps(made), asked.overrides, source="plan", where="")[0], False


def _tokens(text: str | None, config: TrainConfig) -> tuple[int, int]:
    if text is None:
        return config.batch_size, config.max_length or DEFAULT["max_length"]
    match = re.fullmatch(r"(\d{1,6})x(\d{1,8})", text.strip().lower())
    if match is None or not (int(match[1]) and int(match[2])):
        raise UserError(f"--tokens: found {text!r}, expected samples x tokens, such as 4x1024")
    return int(match[1]), int(match[2])


def _bytes(option: str, text: str) -> int:
    try:
        return int(Bytes.parse(text))
    except ValueError as error:
        raise UserError(f"{option}: {text!r} is not {error}") from error


def _rate(text: str) -> float:
    size = text.strip().removesuffix("/s")
    try:
        return float(Bytes.parse(size))
    except ValueError as error:
        raise UserError(f"--link: {text!r} is no rate, such as 25GB/s") from error


def _machine(
    asked: Asked, config: TrainConfig, say: Callable[[str], None]
) -> tuple[Rates, torch.device | None, int | None, int]:
    """Its rates, its device where it is this one, and the GPU and host memory that may be used."""
    gpu = asked.gpu or (str(config.gpu_memory) if config.gpu_memory is not None else None)
    gpu_bytes = None if gpu is None else _bytes("--gpu", gpu)
    device: torch.device | None = None
    name = asked.machine
    if name is None or name == HERE:
        device = choose_device(config.device)
        if device.type == "cpu" and gpu_bytes is not None and name is None:
            large = [key for key, rates in PROFILES.items() if (rates.gpu_bytes or 0) >= gpu_bytes]
            name, device = large[0] if large else list(PROFILES)[-1], None
            say(f"there is no GPU here: planned for --machine {name}, the smallest that has {about(gpu_bytes)}")
    if device is None:
        rates = profile(str(name))
        gpu_bytes = (rates.gpu_bytes or 0) - RESERVE_BYTES if gpu_bytes is None else gpu_bytes
        ram_bytes = int(USABLE * rates.host_bytes)
    else:
        rates = rates_of(device, asked.measure, say)
        if device.type == "cuda":
            free = int(USABLE * torch.cuda.mem_get_info(device)[0])
            gpu_bytes = free if gpu_bytes is None else gpu_bytes
        else:
            gpu_bytes = None
        ram_bytes = host_memory().available_bytes
    if asked.ram is not None:
        ram_bytes = _bytes("--ram", asked.ram)
        rates = replace(rates, host_bytes=ram_bytes)
    if asked.link is not None:
        rates = rates.with_link(_rate(asked.link))
    return rates, device, gpu_bytes, ram_bytes


def pace_line(model: Model, method: str, entries: Sequence[dict[str, Any]]) -> str | None:
    """`check: 0.365 s per step, planned 0.392 s (link)`: of the steps so far, and of the plan at their mean tokens.
    None where the machine was never measured and is not known."""
    rates = known(model.device)
    if rates is None or model.placed is None or not entries:
        return None
    row, placed = METHODS[method], model.placed
    micro = max(1, placed.work.passes // row.passes(placed.work.settings or row.settings()))
    tokens = max(1, round(statistics.fmean(entry["tokens"] for entry in entries) / micro))
    work = replace(placed.work, method=method, tokens=min(tokens, placed.work.tokens))
    work = replace(work, experts=experts_share(model.config))
    formats: Wire = model.formats
    room = Room(formats, placed.workspace_bytes, placed.limit_bytes)
    streamed = model.engine.streamed
    asked = row.planned_work(model.layout, streamed, work, room, rates)
    sweeps = 2 if row.sweep == "reverse" else 1
    how = {"rows": work.tokens, "itemsize": formats.dtype.itemsize, "units": sweeps * len(streamed)}
    planned = step_seconds(asked, rates, **how)
    measured = statistics.median(entry["seconds"] for entry in entries)
    source = "rates measured here" if rates.measured else "estimated rates; `keyhole plan` measures this machine"
    return (
        f"check: {measured:.3g} s per step, planned {planned.total:.3g} s, bound by {planned.bound_by} "
        f"({tokens * micro:,.0f} tokens; {source})"
    )
