"""What one field demands of another, and what is filled in when a field is left null. All of it, here.

The rule above all is "exact or refused": a setting that a method cannot honour is a fault with the change
that fixes it; one that is only useless is a warning. `apply` changes nothing when it is applied twice.

Learning rates: the default of a method, and the range in which it has been seen to work on models of 0.1 to
13 billion parameters (zo: the MeZO grids, 1e-7 to 1e-5; a zeroth-order step is far noisier than a gradient,
so its rate is some 20 to 100 times smaller). The embedded demo model is far smaller and not judged by it.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from keyhole import assets
from keyhole.config.faults import Finding
from keyhole.config.fields import section_of, sections
from keyhole.config.schema import TrainConfig

DEFAULT_LR = {
    "adamw": 2e-5, "sgd": 5e-3, "zo": 1e-6, "lomo": 5e-3, "adalomo": 5e-4, "lora": 2e-4, "galore": 1e-4,
    "lomo-lora": 5e-3, "adam-offload": 2e-5, "lsp": 2e-5,
}  # fmt: skip
SANE_LR = {
    "adamw": (1e-7, 5e-4), "sgd": (1e-5, 1e-1), "zo": (1e-8, 2e-5), "lomo": (1e-5, 1e-1),
    "adalomo": (1e-5, 5e-3), "lora": (1e-5, 5e-3), "galore": (1e-6, 1e-2), "adam-offload": (1e-7, 5e-4),
    "lsp": (1e-7, 1e-3), "lomo-lora": (1e-5, 1e-1),
}  # fmt: skip
UNDERFLOW_SAFE = ("zo", "lomo", "adalomo", "lomo-lora")  # no gradient, or a loss scale
STREAMS = ("zo", "lomo", "adalomo", "lomo-lora", "adam-offload", "lsp")
WIRES = ("zo", "lomo", "adalomo", "lomo-lora", "lsp")


def apply(config: TrainConfig) -> tuple[TrainConfig, list[Finding], list[Finding]]:
    """(config with its blanks filled, faults, warnings)."""
    faults = list(_faults(config))
    warnings = list(_warnings(config))
    return _fill(config), faults, warnings


def _faults(config: TrainConfig) -> Iterator[Finding]:
    if config.max_steps is None and config.num_train_epochs is None:
        yield Finding("max_steps", "set max_steps or num_train_epochs: the run has no end")
    if config.eval_steps is not None and config.eval_data is None:
        yield Finding("eval_steps", "is set but eval_data is not; set eval_data, or eval_steps=null")
    if config.packing and config.max_length is None:
        yield Finding("packing", "needs max_length: it is the length of a packed row")
    if config.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", config.device):
        yield Finding("device", f"found `{config.device}`, expected cpu, cuda or cuda:N, or null to choose")
    if os.path.realpath(config.output_dir) == os.path.realpath(config.model):
        yield Finding("output_dir", "is the model's own directory, which it would overwrite; choose another")
    if config.method == "zo" and config.max_grad_norm is not None:
        yield Finding("max_grad_norm", "zo has no gradient to clip; set max_grad_norm=null and use zo.clip")
    if config.method in ("lomo", "adalomo", "lomo-lora"):
        yield from _lomo_faults(config)
    if config.method == "lsp":
        yield from _lsp_faults(config)
    if config.method not in WIRES and config.wire is not None:
        yield Finding("wire", f"{config.method} cannot use a format of its own; set wire=null and choose dtype")
    if config.method not in STREAMS and config.placement == "stream":
        streams = ", ".join(STREAMS[:-1]) + f" or {STREAMS[-1]}"
        yield Finding("placement", f"{config.method} cannot stream; set placement=resident, or method={streams}")


def _lomo_faults(config: TrainConfig) -> Iterator[Finding]:
    name = section_of(config.method)
    own = getattr(config, name)
    clips = {"max_grad_norm": config.max_grad_norm, f"{name}.clip_value": own.clip_value}
    clips[f"{name}.clip_group_norm"] = own.clip_group_norm
    given = [key for key, value in clips.items() if value is not None]
    if len(given) > 1:
        yield Finding(given[1], f"contradicts {given[0]}: gradients are clipped in one way; set one of them to null")
    if config.wire == "fp8":
        yield Finding("wire", f"{name} cannot add updates up in 8 bits; use fp32, bf16 or fp16, or method=zo")
    if config.placement == "stream" and own.activations == "none":
        yield Finding(f"{name}.activations", "none needs all weights on the device; use block or host, or resident")
    if config.method == "lomo-lora" and own.compile:
        yield Finding(f"{name}.compile", "compiled blocks cannot have adapters; set it to false, or method=lomo")
    if config.placement == "stream" and own.rounding == "kahan":
        yield Finding(f"{name}.rounding", "kahan is for weights on the device; use stochastic, or wire=fp32")


def _lsp_faults(config: TrainConfig) -> Iterator[Finding]:
    own = config.lsp
    if own.r > own.d:
        yield Finding("lsp.r", f"{own.r} numbers a row do not fit into lsp.d={own.d} columns; set r <= d")
    if config.dtype == "float16":
        yield Finding("dtype", "lsp has no loss scaling, and float16 gradients underflow without; use bfloat16")
    if config.wire == "fp8":
        yield Finding("wire", "lsp cannot add updates up in 8 bits; use fp32, bf16 or fp16, or method=zo")


def _warnings(config: TrainConfig) -> Iterator[Finding]:
    for name, cls in sections().items():
        for key, value in dataclasses.asdict(getattr(config, name)).items():
            if value != getattr(cls(), key) and (why := _unused(name, config)):
                yield Finding(f"{name}.{key}", f"has no effect: {why}")
    if config.max_steps is not None and config.num_train_epochs is not None:
        yield Finding("num_train_epochs", "has no effect: max_steps is set, and decides")
    if config.journal_sync != 1 and config.method != "zo":
        yield Finding("journal_sync", f"has no effect: {config.method} keeps no journal, only zo does")
    if config.dtype == "float16" and config.method not in UNDERFLOW_SAFE:
        yield Finding("dtype", "float16 gradients underflow without loss scaling; bfloat16 is safer")
    low, high = SANE_LR[config.method]
    rate = config.learning_rate
    if rate is not None and not low <= rate <= high and not assets.is_demo_model(config.model):
        known = f"{config.method} is known to work from {low:g} to {high:g}"
        yield Finding("learning_rate", f"{rate:g} is an unusual value: {known}")


def _unused(section: str, config: TrainConfig) -> str:
    """Why nothing reads a section; "" where something does."""
    if section == "offload":
        return "placement is resident" if config.placement == "resident" else ""
    return f"the method is {config.method}" if section != section_of(config.method) else ""


def _fill(config: TrainConfig) -> TrainConfig:
    rate = DEFAULT_LR[config.method] if config.learning_rate is None else config.learning_rate
    epochs = config.num_train_epochs if config.max_steps is None else None
    return replace(
        config,
        model=assets.locate(config.model, assets.MODEL),
        train_data=_locate_all(config.train_data, assets.TRAIN),
        eval_data=_locate_all(config.eval_data, assets.TEST),
        learning_rate=rate,
        num_train_epochs=epochs,
    )


def _locate_all(data: str | list[str] | None, stands_for: Path) -> str | list[str] | None:
    if isinstance(data, list):
        return [assets.locate(item, stands_for) for item in data]
    return data if data is None else assets.locate(data, stands_for)
