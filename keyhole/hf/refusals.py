"""Arguments of Hugging Face's Trainer that a method which updates weights within its step cannot support.

All of them are checked before the model is loaded, and reported in one message, each with the reason and an
alternative. A setting that would be ignored is refused: a run that silently differs from its script is worse than one
that does not start.
"""

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from keyhole import assets
from keyhole.errors import UserError
from keyhole.methods.settings import AdamSettings, Around, MethodSettings
from keyhole.methods.traits import Traits

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
    "optim_args": "they belong to optim, which is not used: settings= has the method's own",
    "debug": "its hooks watch calls of the module; a streamed model is not called as one",
    "activation_offloading": "the method decides what is kept: settings={'activations': 'host'}",
    "model_init_kwargs": "the model is loaded by keyhole; give dtype, placement and wire to the trainer",
}
CALLED: dict[str, str] = {  # arguments of the Trainer itself
    "model_init": "the model is loaded once, by keyhole; make a new trainer for another one",
    "compute_loss_func": "losses are taken from chunks of the vocabulary; use ZO.step(closure) for any loss",
    "optimizer_cls_and_kwargs": "the method is the optimizer; choose method=",
    "peft_config": "the method decides what is trained: method='lora' has adapters, settings={'r': 8, 'alpha': 16}",
    "quantization_config": "wire= decides in which format the weights are kept: int8, int4 or nf4 for method='lora'",
}
# What a subclass or another Trainer may define and would never be called: (method, what to do instead)
UNUSED: dict[str, str] = {
    "compute_loss": "the loss is that of the model's tokens; use keyhole.ZO and its step(closure) for another one",
    "compute_loss_context_manager": "the method decides in which dtype it computes",
    "_prepare_inputs": "change batches in data_collator",
    "_prepare_input": "change batches in data_collator",
    "get_decay_parameter_names": "weight_decay_on decides: matrices or all",
    "get_optimizer_cls_and_kwargs": "the method is the optimizer; choose method=",
}
REPLACED = ("training_step", "prediction_step", "create_optimizer")  # these of keyhole take the place of a base's
KNOWN = ("transformers.trainer.Trainer", "trl.trainer.sft_trainer.SFTTrainer")  # whose own ones give the same results


def check_class(cls: type, mixin: type) -> None:
    """UserError for a Trainer with a loss or a step of its own, which keyhole's step would never call."""
    behind = cls.__mro__[cls.__mro__.index(mixin) + 1 :]
    first = f"{mixin.__name__} comes first and has its own; override it in a subclass of both, or use another Trainer"
    unused = [(name, instead, cls.__mro__) for name, instead in UNUSED.items()]
    for name, instead, bases in unused + [(name, first, behind) for name in REPLACED]:
        owner = next((base for base in bases if name in vars(base)), None)
        if owner is not None and f"{owner.__module__}.{owner.__qualname__}" not in KNOWN:
            raise UserError(f"{owner.__name__}.{name} would never be called: {instead}")


def check(args: TrainingArguments, row: Traits, own: MethodSettings, options: dict[str, Any], **placed: Any) -> None:
    """UserError with all unsupported arguments. placed: wire and placement, as asked for."""
    said, default = vars(args), {each.name: each.default for each in fields(TrainingArguments)}
    optim, loss_type, steps = OptimizerNames(args.optim).value, said.get("loss_type"), args.max_steps
    table: list[tuple[object, str, str]] = [
        *((said.get(key), key, why) for key, why in OFF.items()),
        *((options.get(key) is not None, key, why) for key, why in CALLED.items()),
        (any(each is not None for each in options.get("optimizers") or ()), "optimizers",
         "the method is the optimizer; a schedule of your own: override create_scheduler"),
        (args.world_size > 1, "world_size", f"{args.world_size} processes were started; keyhole.hf trains in one"),
        (optim != OptimizerNames(default["optim"]).value, "optim",
         f"{optim} is not used: the method is {row.name}; leave optim out"),
        (args.save_only_model and args.load_best_model_at_end, "save_only_model",
         "load_best_model_at_end loads the method's state of that step too; set one of them to False"),
        (args.max_grad_norm is None, "max_grad_norm", "None is not possible in the Trainer; set 0 for no clipping"),
        ((args.max_grad_norm or 0) > 0 and row.sweep == "forward", "max_grad_norm",
         f"{row.name} has no gradient to clip; set max_grad_norm=0 (and clip in its settings)"),
        *((said[key] != default[key] and not issubclass(row.settings, AdamSettings), key,
           f"{row.name} has no such number; leave it out") for key in ADAM),
        (vars(own).get("adapter_warmup_ratio") is not None, "settings",
         "adapter_warmup_ratio: the Trainer's schedule is known only as it goes; leave it out"),
        (vars(args.accelerator_config).get("dispatch_batches"), "accelerator_config",
         "dispatch_batches: the method itself sends batches to the device; leave it out"),
        (loss_type not in (None, "nll"), "loss_type", f"{loss_type} replaces the model's loss; set loss_type='nll'"),
    ]  # fmt: skip
    found = [f"  {key}: {why}" for broken, key, why in table if broken]
    around = Around(**placed, max_steps=steps if steps > 0 else None)
    found += [f"  {key}: {why}" for key, why in own.faults(around) if key != "max_grad_norm"]
    if found:
        raise UserError("\n".join([f"KeyholeTrainer with method={row.name} cannot honour these settings:", *found]))


def warn_of_rate(args: TrainingArguments, row: Traits, own: MethodSettings, model: object) -> None:
    """Warns of an unusual rate: the Trainer's default is AdamW's, with which other methods learn nothing or diverge."""
    usual, (low, high) = row.rates(own)
    is_demo = isinstance(model, str | Path) and assets.is_demo_model(str(model))
    if not low <= args.learning_rate <= high and not is_demo:
        warnings.warn(
            f"learning_rate: {args.learning_rate:g} is an unusual value for {row.name}, which is known to work from "
            f"{low:g} to {high:g}; usual is {usual:g}",
            stacklevel=4,
        )


def check_loaded(args: TrainingArguments, given: dict[str, object]) -> None:
    """A model that keyhole.load has placed already is not placed again."""
    late = [name for name in ("placement", "gpu_memory", "dtype", "wire") if given[name] is not None]
    said = {key: vars(args).get(key) for key in ("placement", "gpu_memory", "wire", "model_dtype")}
    late += [key for key, value in said.items() if value not in (None, "resident")]
    if late:
        raise UserError(f"{', '.join(dict.fromkeys(late))}: the model is loaded already; give them to keyhole.load")


def check_bf16(args: TrainingArguments, dtype: str) -> None:
    """bf16=True means bfloat16 arithmetic: it is accepted only for a model that was loaded in bfloat16."""
    if args.bf16 and dtype != "bfloat16":
        raise UserError(
            f"bf16: the model computes in {dtype}; load it in bfloat16 (model_dtype='bfloat16'; wire='fp32' keeps fp32 "
            "weights), or set bf16=False"
        )
