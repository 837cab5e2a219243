"""TrainingArguments with the few settings that keyhole adds, and the model and the method that they ask for.

Two defaults differ from Hugging Face's: no clipping (max_grad_norm=0: clipping by the exact norm costs a second
backward pass in lomo, and zo has no gradient), and losses are not checked after every step
(logging_nan_inf_filter=False: the check would synchronise GPU and host; a loss that is not finite gives no update).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, TrainingArguments

from keyhole.errors import UserError
from keyhole.loading import load
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.settings import AdamSettings, MethodSettings, check_values, checked_rate
from keyhole.methods.traits import Traits
from keyhole.methods.workload import Workload
from keyhole.model.model import Model

DEFAULT_LENGTH = 1024


@dataclass
class KeyholeArguments(TrainingArguments):
    """Arguments of KeyholeTrainer."""

    method: str | None = field(default=None, metadata={"help": "How the weights are updated: zo, lomo, lsp, ..."})
    method_settings: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Settings of the method, as in its section of a config (docs/config.md); or JSON of them."},
    )
    placement: str = field(default="resident", metadata={"help": "resident, stream or auto."})
    gpu_memory: str | None = field(default=None, metadata={"help": "Most GPU memory to use, such as 8GiB."})
    model_dtype: str | None = field(
        default=None, metadata={"help": "float32, bfloat16, float16; None: as stored, if usable."}
    )
    wire: str | None = field(default=None, metadata={"help": "Format of the weights at rest and on the link."})
    weight_decay_on: str = field(default="matrices", metadata={"help": "matrices (as Hugging Face), or all."})
    max_length: int | None = field(default=1024, metadata={"help": "Longest sample, for the plan of memory."})
    max_grad_norm: float = field(
        default=0.0, metadata={"help": "Clips the norm of the whole gradient; 0: no clipping."}
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Look at every loss, and wait for it."})


@dataclass(frozen=True)
class Wanted:
    """The settings of keyhole, from the arguments of the trainer or its TrainingArguments; the former win."""

    method: str
    settings: dict[str, Any]
    own: MethodSettings  # the method's settings, and what TrainingArguments say of them
    placement: str
    gpu_memory: str | int | None
    dtype: str | None
    wire: str | None
    max_length: int

    @property
    def row(self) -> Traits:
        return METHODS[self.method]


def wanted(args: TrainingArguments, given: dict[str, Any]) -> Wanted:
    """Collects and checks the settings; UserError for unknown names. given: by the trainer's own arguments."""
    said: dict[str, Any]
    said = {"placement": "resident", "weight_decay_on": "matrices", "max_length": DEFAULT_LENGTH}
    said |= {name: value for name, value in vars(args).items() if value is not None}
    said |= {"settings": said.get("method_settings", {}), "dtype": said.get("model_dtype")}
    said |= {name: value for name, value in given.items() if value is not None}
    method, length = said.get("method"), said["max_length"]
    checked_rate(args.learning_rate, "learning_rate")
    if method is None:
        ways = "KeyholeArguments(..., method=...) or KeyholeTrainer(..., method=...)"
        raise UserError(f"method: none is given; set it by {ways}, to one of {', '.join(METHODS)}")
    if method not in METHODS:
        raise UserError(f"method: found {method!r}, expected one of {', '.join(METHODS)}")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise UserError(f"max_length: found {length!r}, expected the tokens of the longest sample, at least 1")
    row, decay = METHODS[method], said["weight_decay_on"]
    settings = _checked(row, said["settings"])
    clip = args.max_grad_norm if (args.max_grad_norm or 0) > 0 else None  # as the Trainer does
    of_args = {"weight_decay": args.weight_decay, "weight_decay_on": decay, "max_grad_norm": clip, "seed": args.seed}
    if issubclass(row.settings, AdamSettings):
        of_args |= {"beta1": args.adam_beta1, "beta2": args.adam_beta2, "eps": args.adam_epsilon}
    own = row.settings(**(of_args | settings))
    memory, dtype, wire = said.get("gpu_memory"), said["dtype"], said.get("wire")
    return Wanted(method, settings, own, said["placement"], memory, dtype, wire, length)


def _checked(row: Traits, settings: Any) -> dict[str, Any]:
    """The method's settings, given as a dict or as the text of one in JSON: known names, and values of their types."""
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except ValueError as error:
            raise UserError(f"method_settings: found {settings!r}, expected JSON such as {{...}}: {error}") from None
    if not isinstance(settings, Mapping):
        raise UserError(f"settings: found a {type(settings).__name__}, expected a dict such as {{'compile': True}}")
    check_values(row.settings, settings, row.section)
    return dict(settings)


def load_model(source: object, asked: Wanted, args: TrainingArguments) -> Model:
    """The model, placed as the arguments say; a loaded model is left unchanged."""
    if isinstance(source, Model):
        return source
    if not isinstance(source, str | Path | PretrainedConfig):
        path = getattr(source, "name_or_path", None)
        instead = f"give its name, {path!r}" if path else "give a directory, a hub id, a config"
        raise UserError(
            f"model: found a {type(source).__name__}; {instead}, or what keyhole.load returns: keyhole reads the "
            "weights itself, directly into host memory or onto the GPU"
        )
    tokens, passes = args.per_device_train_batch_size * asked.max_length, args.gradient_accumulation_steps
    work = Workload(
        asked.method, tokens, passes * asked.own.passes, asked.own, args.max_grad_norm > 0, length=asked.max_length
    )
    return load(
        source,
        init="random" if isinstance(source, PretrainedConfig) else "pretrained",
        placement=asked.placement,
        gpu_memory=asked.gpu_memory,
        device="cpu" if args.use_cpu else None,
        dtype=asked.dtype or "auto",
        wire=asked.wire,
        seed=args.seed,
        tf32=bool(args.tf32),
        workload=work,
    )


def make_method(model: Model, asked: Wanted, args: TrainingArguments) -> Method:
    torch.manual_seed(args.seed)
    method: Method = asked.row.load()(model, args.learning_rate, **vars(asked.own))
    return method
