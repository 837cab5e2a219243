"""The model and the method that a Trainer's arguments ask for."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, TrainingArguments

from keyhole.errors import UserError
from keyhole.loading import load
from keyhole.methods import METHODS
from keyhole.methods.base import Method, Shared, Traits, Workload
from keyhole.model.model import Model

DEFAULT_LENGTH = 1024


@dataclass(frozen=True)
class Wanted:
    """What keyhole is asked for, from the arguments of the trainer or its TrainingArguments; the former win."""

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
    """Checked names; UserError for what does not exist."""

    def either(name: str, of_args: str | None = None, default: Any = None) -> Any:
        if given.get(name) is not None:
            return given[name]
        found = getattr(args, of_args or name, None)
        return default if found is None else found

    method = either("method")
    if method not in METHODS:
        raise UserError(f"method: found {method!r}, expected one of {', '.join(METHODS)}")
    settings = dict(either("settings", "method_settings", {}))
    known = {each.name for each in fields(METHODS[method].settings)}
    if unknown := sorted(settings.keys() - known):
        raise UserError(f"settings: {method} has no {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
    return Wanted(
        method,
        settings,
        either("placement", default="resident"),
        either("gpu_memory"),
        either("dtype", "model_dtype"),
        either("wire"),
        either("weight_decay_on", default="matrices"),
        either("max_length", default=DEFAULT_LENGTH),
    )


def own_settings(asked: Wanted, args: TrainingArguments) -> Any:
    """The method's section. Numbers of Adam are those of the TrainingArguments, unless the section names them."""
    takes = {each.name for each in fields(asked.row.settings)}
    adam = {"beta1": args.adam_beta1, "beta2": args.adam_beta2, "eps": args.adam_epsilon}
    of_args = adam if {"beta1", "beta2", "eps"} <= takes else {}
    return asked.row.settings(**(of_args | asked.settings))


def load_model(source: Any, asked: Wanted, own: Any, args: TrainingArguments) -> Model:
    """The model where the arguments want it; one that is loaded already stays as it is."""
    if isinstance(source, Model):
        return source
    if not isinstance(source, str | Path | PretrainedConfig):
        path = getattr(source, "name_or_path", None)
        instead = f"give its name, {path!r}" if path else "give a directory or hub id"
        raise UserError(
            f"model: found a {type(source).__name__}; {instead}, or what keyhole.load returns: the weights are read to "
            "where they will live"
        )
    row = asked.row
    tokens = args.per_device_train_batch_size * asked.max_length
    passes = args.gradient_accumulation_steps * row.passes(own)
    work = Workload(asked.method, tokens, passes, own, bool(args.max_grad_norm), length=asked.max_length)
    where = {"placement": asked.placement, "gpu_memory": asked.gpu_memory, "device": "cpu" if args.use_cpu else None}
    how = {"dtype": asked.dtype or "auto", "wire": asked.wire, "seed": args.seed}
    if isinstance(source, PretrainedConfig):
        how["init"] = "random"
    return load(source, workload=work, **where, **how)


def make_method(model: Model, asked: Wanted, own: Any, args: TrainingArguments) -> Method:
    """The method as the arguments ask for it."""
    shared = Shared(
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        weight_decay_on=asked.weight_decay_on,
        max_grad_norm=args.max_grad_norm or None,
        seed=args.seed,
    )
    torch.manual_seed(args.seed)
    return asked.row.load().make(model, shared, own)
