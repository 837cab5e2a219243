"""Loads the model and creates the method for a Trainer's arguments."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, TrainingArguments

from keyhole.errors import UserError
from keyhole.loading import load
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.settings import AdamSettings, MethodSettings, check_values
from keyhole.methods.traits import Traits
from keyhole.methods.workload import Workload
from keyhole.model.model import Model

DEFAULT_LENGTH = 1024


@dataclass(frozen=True)
class Wanted:
    """The settings of keyhole, from the arguments of the trainer or its TrainingArguments; the former win."""

    method: str
    settings: dict[str, Any]
    placement: str
    gpu_memory: str | int | None
    dtype: str | None
    wire: str | None
    weight_decay_on: str
    max_length: int

    @property
    def row(self) -> Traits:
        return METHODS[self.method]


def wanted(args: TrainingArguments, given: dict[str, Any]) -> Wanted:
    """Collects and checks the settings; UserError for unknown names."""

    def either(name: str, of_args: str | None = None, default: Any = None) -> Any:
        if given.get(name) is not None:
            return given[name]
        found = getattr(args, of_args or name, None)
        return default if found is None else found

    method = either("method")
    if method is None:
        ways = "KeyholeArguments(..., method=...) or KeyholeTrainer(..., method=...)"
        raise UserError(f"method: none is given; set it by {ways}, to one of {', '.join(METHODS)}")
    if method not in METHODS:
        raise UserError(f"method: found {method!r}, expected one of {', '.join(METHODS)}")
    length = either("max_length", default=DEFAULT_LENGTH)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise UserError(f"max_length: found {length!r}, expected the tokens of the longest sample, at least 1")
    return Wanted(
        method,
        _checked(METHODS[method], either("settings", "method_settings", {})),
        either("placement", default="resident"),
        either("gpu_memory"),
        either("dtype", "model_dtype"),
        either("wire"),
        either("weight_decay_on", default="matrices"),
        length,
    )


def _checked(row: Traits, settings: Any) -> dict[str, Any]:
    """The method's settings, given as a dict or as the text of one in JSON: known names, and values of their types."""
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except ValueError as error:
            raise UserError(f"method_settings: found {settings!r}, expected JSON such as {{...}}: {error}") from None
    if not isinstance(settings, Mapping):
        raise UserError(f"settings: found a {type(settings).__name__}, expected a dict such as {{'compile': True}}")
    known = {each.name for each in fields(row.settings)}
    if unknown := sorted(str(name) for name in settings.keys() - known):
        raise UserError(f"settings: {row.name} has no {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
    check_values(row.settings, settings, row.section)
    return dict(settings)


def own_settings(asked: Wanted, args: TrainingArguments) -> MethodSettings:
    """The method's settings. Those that TrainingArguments have come from there, unless the settings have them."""
    of_args: dict[str, Any] = {"weight_decay": args.weight_decay, "weight_decay_on": asked.weight_decay_on}
    of_args["max_grad_norm"] = args.max_grad_norm if (args.max_grad_norm or 0) > 0 else None  # as the Trainer does
    of_args["seed"] = args.seed
    if issubclass(asked.row.settings, AdamSettings):
        of_args |= {"beta1": args.adam_beta1, "beta2": args.adam_beta2, "eps": args.adam_epsilon}
    return asked.row.settings(**(of_args | asked.settings))


def load_model(source: Any, asked: Wanted, own: MethodSettings, args: TrainingArguments) -> Model:
    """The model, placed as the arguments say; a loaded model is left unchanged."""
    if isinstance(source, Model):
        return source
    if not isinstance(source, str | Path | PretrainedConfig):
        path = getattr(source, "name_or_path", None)
        instead = f"give its name, {path!r}" if path else "give a directory or hub id"
        raise UserError(
            f"model: found a {type(source).__name__}; {instead}, or what keyhole.load returns: keyhole reads the "
            "weights itself, directly into host memory or onto the GPU"
        )
    tokens = args.per_device_train_batch_size * asked.max_length
    passes = args.gradient_accumulation_steps * own.passes
    work = Workload(asked.method, tokens, passes, own, args.max_grad_norm > 0, length=asked.max_length)
    where: dict[str, Any]
    where = {"placement": asked.placement, "gpu_memory": asked.gpu_memory, "device": "cpu" if args.use_cpu else None}
    how: dict[str, Any]
    how = {"dtype": asked.dtype or "auto", "wire": asked.wire, "seed": args.seed, "tf32": bool(args.tf32)}
    if isinstance(source, PretrainedConfig):
        how["init"] = "random"
    return load(source, workload=work, **where, **how)


def make_method(model: Model, asked: Wanted, own: MethodSettings, args: TrainingArguments) -> Method:
    """The method with the settings of the arguments."""
    torch.manual_seed(args.seed)
    method: Method = asked.row.load()(model, args.learning_rate, **vars(own))
    return method
