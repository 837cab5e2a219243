"""What Hugging Face's Trainer offers and a method that updates weights within its step cannot honour.

Everything is checked before the model is loaded, and told at once, each with the reason and what to do instead. A
setting that would be ignored is refused: a run that does not do what its script says is worse than one that does not
start.
"""

import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from keyhole import assets
from keyhole.errors import UserError
from keyhole.methods.base import Traits

ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
OFF: dict[str, str] = {  # arguments that must be off, and why
    "fp16": "keyhole scales no loss by a GradScaler; load the model with dtype float16 for a method that can (lomo), "
    "or bfloat16",
    "fp16_full_eval": "the model is evaluated in the dtype that it was loaded in",
    "bf16_full_eval": "the model is evaluated in the dtype that it was loaded in",
    "gradient_checkpointing": "the method decides what is kept: settings={'activations': 'block' or 'host'}",
    "neftune_noise_alpha": "noise on embeddings is added by a hook that streamed embeddings do not pass",
    "label_smoothing_factor": "losses are taken from chunks of the vocabulary, without smoothing",
    "deepspeed": "one process trains the model; keyhole streams instead of sharding",
    "fsdp": "one process trains the model; keyhole streams instead of sharding",
    "torch_compile": "blocks are compiled by the method: settings={'compile': True}",
    "auto_find_batch_size": "the plan says what fits: keyhole plan MODEL --tokens BxT",
    "use_liger_kernel": "its kernels replace the modules that keyhole streams",
    "optim_target_modules": "every parameter is trained; choose a method with adapters for a part",
    "torch_empty_cache_steps": "memory is planned, and a cache that is emptied would be filled again",
}
CALLED: dict[str, str] = {  # arguments of the Trainer itself
    "model_init": "the model is loaded once, by keyhole; make a new trainer for another one",
    "compute_loss_func": "losses are taken from chunks of the vocabulary; use ZO.step(closure) for any loss",
    "optimizer_cls_and_kwargs": "the method is the optimizer; choose method=",
}


def check(args: TrainingArguments, row: Traits, own: Any, options: dict[str, Any]) -> None:
    """UserError with everything that is in the way."""
    found = [f"  {key}: {why}" for key, why in _found(args, row, own, options)]
    if found:
        raise UserError("\n".join([f"KeyholeTrainer with method={row.name} cannot honour these settings:", *found]))


def _found(args: TrainingArguments, row: Traits, own: Any, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, why in OFF.items():
        if getattr(args, key, None):
            yield key, why
    for key, why in CALLED.items():
        if options.get(key) is not None:
            yield key, why
    if any(each is not None for each in options.get("optimizers") or ()):
        yield "optimizers", "the method is the optimizer; a schedule of your own: override create_scheduler"
    if args.world_size > 1:
        yield "world_size", f"{args.world_size} processes were started; keyhole.hf trains in one"
    default = {each.name: each.default for each in fields(TrainingArguments)}
    optim = getattr(args.optim, "value", args.optim)
    if optim != getattr(default["optim"], "value", default["optim"]):
        yield "optim", f"{optim} is not used: the method is {row.name}; leave optim out"
    if args.max_grad_norm and row.sweep == "forward":
        yield "max_grad_norm", f"{row.name} has no gradient to clip; set max_grad_norm=0 (and clip in its settings)"
    takes = {each.name for each in fields(row.settings)}
    for key in ADAM:
        if getattr(args, key) != default[key] and not {"beta1", "beta2"} <= takes:
            yield key, f"{row.name} has no such number; leave it out"
    if getattr(own, "adapter_warmup_ratio", None) is not None:
        yield "settings", "adapter_warmup_ratio: the Trainer's schedule is known only as it goes; leave it out"
    loss_type = getattr(args, "loss_type", None)
    if loss_type not in (None, "nll"):
        yield "loss_type", f"{loss_type} replaces the model's loss; set loss_type='nll'"
    if getattr(args, "assistant_only_loss", False) and getattr(args, "use_liger_kernel", False):
        yield "assistant_only_loss", "with use_liger_kernel it has no effect"


def warn_of_rate(args: TrainingArguments, row: Traits, own: Any, model: Any) -> None:
    """The Trainer's default rate is AdamW's: other methods learn nothing with it, or forget everything."""
    usual, (low, high) = row.rates(own)
    is_demo = isinstance(model, str | Path) and assets.is_demo_model(str(model))
    if not low <= args.learning_rate <= high and not is_demo:
        warnings.warn(
            f"learning_rate: {args.learning_rate:g} is an unusual value for {row.name}, which is known to work from "
            f"{low:g} to {high:g}; usual is {usual:g}",
            stacklevel=4,
        )


def check_bf16(args: TrainingArguments, dtype: str) -> None:
    """bf16=True asks for products in bfloat16: those of a model that was loaded so, and of no other."""
    if args.bf16 and dtype != "bfloat16":
        raise UserError(
            f"bf16: the model computes in {dtype}; load it in bfloat16 (model_dtype='bfloat16'; wire='fp32' keeps fp32 "
            "weights), or set bf16=False"
        )
