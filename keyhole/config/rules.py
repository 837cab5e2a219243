"""All rules between settings, and the values that replace null.

The main rule is "exact or refused": a setting that a method cannot implement exactly is a fault, with the change that
fixes it; a setting without effect is a warning. Applying `apply` twice changes nothing.

Rules of a method (its rates, formats, and contradictions) are in its row (methods/<name>/traits.py). The embedded demo
model is far smaller than the models that the rows' rates are for, so it is not checked against them.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from keyhole import assets
from keyhole.config.faults import Finding
from keyhole.config.fields import RUN, around, own_keys, own_settings, sections, settings
from keyhole.config.schema import TrainConfig
from keyhole.limits import describe, fits
from keyhole.machine.text import printable
from keyhole.methods import METHODS, streaming_methods
from keyhole.methods.settings import kinds
from keyhole.methods.traits import AUTO_RATE

SOME = ("activations", "compile", "rounding", "threads", "adam_beta1", "adam_beta2", "adam_epsilon")  # of some methods
OF_TASKS = ("task_data", "task_splits", "num_train", "num_dev", "num_eval")
OF_FILES = (
    "data_format",
    "columns",
    "prompt",
    "completion",
    "train_on",
    "chat_template",
    "chat_template_kwargs",
    "template_date",
    "dedup",
)


def apply(config: TrainConfig) -> tuple[TrainConfig, list[Finding], list[Finding]]:
    """(config with null values filled in, faults, warnings)."""
    faults = list(_faults(config))
    warnings = list(_warnings(config))
    return _fill(config), faults, warnings


def _faults(config: TrainConfig) -> Iterator[Finding]:
    yield from _path_faults(config)
    yield from _data_faults(config)
    yield from _evaluation_faults(config)
    if config.push_to_hub and not config.save_model:
        yield Finding("push_to_hub", "is set, but save_model=false leaves no model to publish; remove one of them")
    if config.packing and config.max_length is None:
        yield Finding("packing", "needs max_length: it is the length of a packed row")
    if config.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", config.device):
        yield Finding("device", f"found `{config.device}`, expected cpu, cuda or cuda:N, or null to choose")
    if os.path.realpath(expanded(config.output_dir)) == os.path.realpath(expanded(config.model)):
        yield Finding("output_dir", "is the model's own directory, which it would overwrite; choose another")
    yield from _method_faults(config)


def _path_faults(config: TrainConfig) -> Iterator[Finding]:
    """Paths that the environment or the file system cannot resolve."""
    for key in ("model", "train_data", "eval_data", "task", "task_data", "output_dir"):
        for path in _as_list(getattr(config, key)):
            if unset := re.search(r"\$\{?(\w+)", expanded(path)):
                yield Finding(key, f"found `{path}`, but there is no variable {unset[1]} in the environment")
            if expanded(path).startswith("~") and not os.path.exists(path):
                yield Finding(key, f"found `{path}`, but there is no home directory of {path[1:].partition('/')[0]}")
            if path != path.encode("utf-8", "replace").decode():
                yield Finding(key, f"`{printable(path)}` is not UTF-8, so no config.yaml can name it; rename it")


def _data_faults(config: TrainConfig) -> Iterator[Finding]:
    """The length of the run, its data or task, and the loss and the head that go with them."""
    if config.max_steps is None and config.num_train_epochs is None:
        yield Finding("max_steps", "set max_steps or num_train_epochs: the run has no end")
    if config.train_data is None and config.task is None:
        yield Finding("train_data", "missing; set train_data (files) or task (a public task by name, such as sst2)")
    if config.task is not None:
        for key in ("train_data", "eval_data"):
            if getattr(config, key) is not None:
                yield Finding(key, "is set and so is task, which has data of its own; remove one of them")
        if config.overlong == "split":
            yield Finding("overlong", "split is for plain text, and a task has questions; use truncate, drop or error")
    elif config.loss != "tokens":
        yield Finding("loss", f"{config.loss} needs a task with candidates; set task, or loss=tokens")
    if config.packing and config.loss == "candidates":
        yield Finding("packing", "does not go with loss=candidates: a row is one candidate; set packing=false")
    if config.head is not None:
        if config.task is None:
            yield Finding("head", f"{config.head} needs the labels of a task; set task, or head=null")
        for key, usual in {"loss": "tokens", "packing": False, "train_end_token": None}.items():
            if getattr(config, key) != usual:
                yield Finding(key, f"has no meaning with head={config.head}; leave it out, or set head=null")
        if (config.metric_for_best_model or "").endswith("perplexity"):
            yield Finding("metric_for_best_model", f"a model with head={config.head} has no perplexity; use loss")
    elif config.num_labels is not None:
        yield Finding("num_labels", "is set but head is not; set head=classification, or num_labels=null")


def _evaluation_faults(config: TrainConfig) -> Iterator[Finding]:
    """Settings that need evaluations, in a run that has none."""
    if config.eval_steps is not None and config.eval_data is None and config.task is None:
        yield Finding("eval_steps", "is set but eval_data is not; set eval_data or task, or eval_steps=null")
    for key in ("load_best_model_at_end", "early_stopping_patience", "metric_for_best_model"):
        if getattr(config, key) and config.eval_data is None and config.task is None:
            yield Finding(key, "is set but eval_data is not: nothing would be compared; set eval_data or task")
        if getattr(config, key) and config.task is not None and config.num_dev == 0:
            yield Finding(key, "is set but num_dev=0: there is nothing to choose by (test never chooses); set num_dev")


def _method_faults(config: TrainConfig) -> Iterator[Finding]:
    """What the method does not support: its own settings, a rate, a dtype, a format of the weights, a placement."""
    row, own = METHODS[config.method], own_settings(config)
    yield from (Finding(*fault) for fault in own.faults(around(config)))
    for name, kind in kinds(row.settings).items():
        key = row.settings.__dataclass_fields__[name].metadata.get("key", name)
        value = vars(config).get(key)
        if key in RUN and value is not None and not fits(value, kind):
            yield Finding(key, f"found `{value}`; {row.name} has {describe(kind)}")
    if config.learning_rate == AUTO_RATE and not row.search_passes:
        finds = ", ".join(other.name for other in METHODS.values() if other.search_passes)
        yield Finding("learning_rate", f"{config.method} cannot find a rate ({finds} can); set a number, or null")
    one_row = config.batch_size * config.gradient_accumulation_steps == 1
    if config.learning_rate == AUTO_RATE and row.search_passes and one_row:
        why = "auto compares two halves of a step's rows, and this step has one"
        yield Finding("learning_rate", f"{why}; raise batch_size or gradient_accumulation_steps, or set a number")
    if config.dtype == "float16" and not row.underflow_safe:
        why = f"{config.method} has no loss scaling, and float16 gradients underflow without"
        yield Finding("dtype", f"{why}; use bfloat16 or float32, or null to let it be chosen")
    wires = row.all_wires(own)
    if config.wire is not None and config.wire not in wires:
        other = f"use {', '.join(wires)}" if wires else "set wire=null and choose dtype"
        beside = [how for m in METHODS.values() if (how := m.beside(config.wire, own_settings(config, m)))]
        other += f"; methods that learn beside such weights: {', '.join(beside)}" if beside else ""
        yield Finding("wire", f"{config.method} cannot update weights that are stored as {config.wire}; {other}")
    if not row.streams and config.placement == "stream":
        streams = streaming_methods()
        yield Finding("placement", f"{config.method} cannot stream; set placement=resident, or method={streams}")


def _warnings(config: TrainConfig) -> Iterator[Finding]:
    for name, cls in sections().items():
        for key in own_keys(cls):
            if vars(vars(config)[name])[key] != vars(cls())[key] and (why := _unused(name, config)):
                yield Finding(f"{name}.{key}", f"has no effect: {why}")
    if config.max_steps is not None and config.num_train_epochs is not None:
        yield Finding("num_train_epochs", "has no effect: max_steps is set, and decides")
    if config.warmup_ratio and config.warmup_steps:
        yield Finding("warmup_ratio", "has no effect: warmup_steps is set, and decides")
    if config.min_lr_ratio and config.lr_scheduler_type != "cosine_with_min_lr":
        yield Finding("min_lr_ratio", f"has no effect: lr_scheduler_type is {config.lr_scheduler_type}")
    if config.eval_steps is not None and config.task is not None and config.num_dev == 0:
        yield Finding("eval_steps", "has no effect: num_dev=0 leaves no questions to evaluate on")
    for key in ("hub_model_id", "hub_private_repo"):
        if getattr(config, key) is not None and not config.push_to_hub:
            yield Finding(key, "has no effect: push_to_hub is false")
    unread: tuple[str, ...] = OF_FILES if config.task is not None else OF_TASKS
    unread = () if config.task is None and config.test_task is not None else unread
    for key in (key for key in unread if getattr(config, key) != settings()[key].default):
        yield Finding(key, f"has no effect: {'task is' if config.task is not None else 'no task is'} set")
    if config.greater_is_better is not None and config.eval_data is None and config.task is None:
        yield Finding("greater_is_better", "has no effect: eval_data is not set, so nothing is compared")
    evaluates = config.eval_data is not None or config.task is not None
    if config.early_stopping_patience is not None and evaluates and (why := _never_stops(config)):
        yield Finding("early_stopping_patience", f"has no effect: {why}")
    row, own = METHODS[config.method], own_settings(config)
    yield from (Finding(key, f"has no effect: {why}") for key, why in own.idle(around(config)))
    keys = {each.metadata.get("key", each.name) for each in dataclasses.fields(own)}
    for key in SOME:
        if vars(config)[key] != settings()[key].default and key not in keys:
            yield Finding(key, f"has no effect: {config.method} has no such setting")
    if config.journal_sync != 1 and not row.journaled:
        keep = ", ".join(other.name for other in METHODS.values() if other.journaled)
        yield Finding("journal_sync", f"has no effect: {config.method} keeps no journal ({keep} does)")
    _, (low, high) = row.rates(own)
    rate = config.learning_rate
    if isinstance(rate, float | int) and not low <= rate <= high and not assets.is_demo_model(config.model):
        known = f"{config.method} is known to work from {low:g} to {high:g}"
        yield Finding("learning_rate", f"{rate:g} is an unusual value: {known}")


def _never_stops(config: TrainConfig) -> str:
    """Why a run ends before it can be out of patience; empty if it may be."""
    every, patience, steps = config.eval_steps, config.early_stopping_patience, config.max_steps
    if patience is None or every is None:
        return "the only evaluation is at the end; set eval_steps"
    if steps is not None and -(-steps // every) <= patience:  # at least one is the best one
        return (
            f"{steps} steps have {-(-steps // every)} evaluations, and it needs more than {patience}; lower eval_steps"
        )
    return ""


def _unused(section: str, config: TrainConfig) -> str:
    """Why a section is not used; "" if it is."""
    if section == "offload":
        return "placement is resident" if config.placement == "resident" else ""
    return f"the method is {config.method}" if section != METHODS[config.method].section else ""


def _fill(config: TrainConfig) -> TrainConfig:
    row = METHODS[config.method]
    own = vars(config)[row.section].filled()
    rate = row.rates(own)[0] if config.learning_rate is None else config.learning_rate
    epochs = config.num_train_epochs if config.max_steps is None else None
    return replace(
        config,
        model=assets.locate(expanded(config.model), assets.MODEL),
        output_dir=expanded(config.output_dir),
        train_data=_locate_all(config.train_data, assets.TRAIN),
        task=[expanded(name) for name in config.task]
        if isinstance(config.task, list)
        else config.task and expanded(config.task),
        task_data=None if config.task_data is None else expanded(config.task_data),
        eval_data=_locate_all(config.eval_data, assets.TEST),
        learning_rate=rate,
        num_train_epochs=epochs,
        **{row.section: own},
    )


def _locate_all(data: str | list[str] | None, stands_for: Path) -> str | list[str] | None:
    found = [assets.locate(expanded(item), stands_for) for item in _as_list(data)]
    return found if isinstance(data, list) else found[0] if found else None


def _as_list(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def expanded(path: str) -> str:
    """The path with ~ and $NAME replaced: in a config, or after `key=`, no shell has expanded them."""
    return os.path.expanduser(os.path.expandvars(path))
