"""All rules between settings, and the values that replace null.

The main rule is "exact or refused": a setting that a method cannot implement exactly is a fault, with the change that
fixes it; a setting without effect is a warning. Applying `apply` twice changes nothing.

Rules of a method (its rates, formats, and contradictions) are in its row (methods/<name>/traits.py). The embedded demo
model is far smaller than the models that the rows' rates are for, so it is not checked against them.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from keyhole import assets
from keyhole.config.faults import Finding
from keyhole.config.fields import around, own_keys, own_settings, run_keys, sections, settings
from keyhole.config.schema import TrainConfig
from keyhole.limits import describe, fits
from keyhole.machine.text import printable
from keyhole.methods import METHODS, streaming_methods

OF_METHODS = {"activations", "compile", "rounding", "threads", "adam_beta1", "adam_beta2", "adam_epsilon"}  # of some
OF_TASKS = ("task_data", "task_splits", "num_train", "num_dev", "num_eval")
OF_FILES = (
    "data_format", "columns", "prompt", "completion", "train_on", "chat_template", "chat_template_kwargs",
    "template_date", "dedup",
)  # fmt: skip
Rule = tuple[object, str, str]  # whether it is broken, the key, and what to say of it


def apply(config: TrainConfig) -> tuple[TrainConfig, list[Finding], list[Finding]]:
    """(config with null values filled in, faults, warnings)."""
    faults = [Finding(key, why) for broken, key, why in (*_faults(config), *_method_faults(config)) if broken]
    idle = [Finding(key, f"has no effect: {why}") for broken, key, why in _idle(config) if broken]
    return _fill(config), [*_path_faults(config), *faults], idle + _unusual(config)


def _path_faults(config: TrainConfig) -> Iterator[Finding]:
    """Paths that the environment or the file system cannot resolve."""
    for key in ("model", "train_data", "eval_data", "task", "task_data", "output_dir"):
        for path in as_list(vars(config)[key]):
            if unset := re.search(r"\$\{?(\w+)", expanded(path)):
                yield Finding(key, f"found `{path}`, but there is no variable {unset[1]} in the environment")
            if expanded(path).startswith("~") and not os.path.exists(path):
                yield Finding(key, f"found `{path}`, but there is no home directory of {path[1:].partition('/')[0]}")
            if path != path.encode("utf-8", "replace").decode():
                yield Finding(key, f"`{printable(path)}` is not UTF-8, so no config.yaml can name it; rename it")


def _faults(c: TrainConfig) -> Iterator[Rule]:
    """The length of the run, its data or task, the loss and the head that go with them, evaluations, and files."""
    task, head, held_out = c.task is not None, c.head is not None, c.task is not None or c.eval_data is not None
    own_data = "is set and so is task, which has data of its own; remove one of them"
    no_meaning = f"has no meaning with head={c.head}; leave it out, or set head=null"
    perplexity = (c.metric_for_best_model or "").endswith("perplexity")
    yield from (
        (c.max_steps is None and c.num_train_epochs is None, "max_steps",
         "set max_steps or num_train_epochs: the run has no end"),
        (c.train_data is None and not task, "train_data",
         "missing; set train_data (files) or task (a public task by name, such as sst2)"),
        (c.train_data is not None and task, "train_data", own_data),
        (c.eval_data is not None and task, "eval_data", own_data),
        (c.overlong == "split" and task, "overlong",
         "split is for plain text, and a task has questions; use truncate, drop or error"),
        (c.loss != "tokens" and not task, "loss",
         f"{c.loss} needs a task with candidates; set task, or loss=tokens"),
        (c.packing and c.loss == "candidates", "packing",
         "does not go with loss=candidates: a row is one candidate; set packing=false"),
        (head and not task, "head", f"{c.head} needs the labels of a task; set task, or head=null"),
        (head and c.loss != "tokens", "loss", no_meaning),
        (head and c.packing, "packing", no_meaning),
        (head and c.train_end_token is not None, "train_end_token", no_meaning),
        (head and perplexity, "metric_for_best_model", f"a model with head={c.head} has no perplexity; use loss"),
        (not head and c.num_labels is not None, "num_labels",
         "is set but head is not; set head=classification, or num_labels=null"),
        (c.eval_steps is not None and not held_out, "eval_steps",
         "is set but eval_data is not; set eval_data or task, or eval_steps=null"),
        (c.push_to_hub and not c.save_model, "push_to_hub",
         "is set, but save_model=false leaves no model to publish; remove one of them"),
        (c.packing and c.max_length is None, "packing", "needs max_length: it is the length of a packed row"),
        (c.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", c.device), "device",
         f"found `{c.device}`, expected cpu, cuda or cuda:N, or null to choose"),
        (os.path.realpath(expanded(c.output_dir)) == os.path.realpath(expanded(c.model)), "output_dir",
         "is the model's own directory, which it would overwrite; choose another"),
    )  # fmt: skip
    for key in ("load_best_model_at_end", "early_stopping_patience", "metric_for_best_model"):
        asked = vars(c)[key]
        nothing = "is set but eval_data is not: nothing would be compared; set eval_data or task"
        yield asked and not held_out, key, nothing
        none_left = "is set but num_dev=0: there is nothing to choose by (test never chooses); set num_dev"
        yield asked and task and c.num_dev == 0, key, none_left


def _method_faults(c: TrainConfig) -> Iterator[Rule]:
    """What the method does not support: its own settings, a rate, a dtype, a format of the weights, a placement."""
    row, own = METHODS[c.method], own_settings(c)
    yield from ((True, key, why) for key, why in own.faults(around(c)))
    for key, kind in run_keys(row.settings).items():
        value = vars(c)[key]
        does_not_fit = value is not None and not fits(value, kind)
        yield does_not_fit, key, f"found `{value}`; {row.name} has {describe(kind)}"
    wires = row.all_wires(own)
    beside = [how for m in METHODS.values() if (how := m.beside(c.wire or "", own_settings(c, m)))]
    other_wire = f"use {', '.join(wires)}" if wires else "set wire=null and choose dtype"
    other_wire += f"; methods that learn beside such weights: {', '.join(beside)}" if beside else ""
    yield from (
        (c.dtype == "float16" and not row.underflow_safe, "dtype",
         f"{c.method} has no loss scaling, and float16 gradients underflow without; use bfloat16 or float32, or null "
         "to let it be chosen"),
        (c.wire is not None and c.wire not in wires, "wire",
         f"{c.method} cannot update weights that are stored as {c.wire}; {other_wire}"),
        (c.placement == "stream" and not row.streams, "placement",
         f"{c.method} cannot stream; set placement=resident, or method={streaming_methods()}"),
    )  # fmt: skip


def _idle(c: TrainConfig) -> Iterator[Rule]:
    """Settings that differ from their defaults and have no effect."""
    row, own, task = METHODS[c.method], own_settings(c), c.task is not None
    changed = {key for key, setting in settings().items() if "." not in key and vars(c)[key] != setting.default}
    for name, cls in sections().items():
        unused = "" if name == row.section else f"the method is {c.method}"
        if name == "offload":
            unused = "placement is resident" if c.placement == "resident" else ""
        for key in own_keys(cls) if unused else ():
            yield vars(vars(c)[name])[key] != vars(cls())[key], f"{name}.{key}", unused
    held_out = task or c.eval_data is not None
    keep = ", ".join(other.name for other in METHODS.values() if other.journaled)
    evaluations = -(-c.max_steps // c.eval_steps) if c.max_steps and c.eval_steps else None
    patience = c.early_stopping_patience if held_out else None
    yield from (
        (c.max_steps is not None and c.num_train_epochs is not None, "num_train_epochs",
         "max_steps is set, and decides"),
        (c.warmup_ratio and c.warmup_steps, "warmup_ratio", "warmup_steps is set, and decides"),
        (c.min_lr_ratio and c.lr_scheduler_type != "cosine_with_min_lr", "min_lr_ratio",
         f"lr_scheduler_type is {c.lr_scheduler_type}"),
        (c.eval_steps is not None and task and c.num_dev == 0, "eval_steps",
         "num_dev=0 leaves no questions to evaluate on"),
        ("hub_model_id" in changed and not c.push_to_hub, "hub_model_id", "push_to_hub is false"),
        ("hub_private_repo" in changed and not c.push_to_hub, "hub_private_repo", "push_to_hub is false"),
        ("greater_is_better" in changed and not held_out, "greater_is_better",
         "eval_data is not set, so nothing is compared"),
        (patience is not None and c.eval_steps is None, "early_stopping_patience",
         "the only evaluation is at the end; set eval_steps"),
        (patience is not None and evaluations is not None and evaluations <= patience,  # at least one is the best one
         "early_stopping_patience",
         f"{c.max_steps} steps have {evaluations} evaluations, and it needs more than {patience}; lower eval_steps"),
        ("journal_sync" in changed and not row.journaled, "journal_sync",
         f"{c.method} keeps no journal ({keep} does)"),
    )  # fmt: skip
    yield from ((task and key in changed, key, "task is set") for key in OF_FILES)
    yield from ((not task and c.test_task is None and key in changed, key, "no task is set") for key in OF_TASKS)
    yield from ((True, key, why) for key, why in own.idle(around(c)))
    others = changed & OF_METHODS - run_keys(row.settings).keys()
    yield from ((True, key, f"{c.method} has no such setting") for key in sorted(others))


def _unusual(c: TrainConfig) -> list[Finding]:
    (_, (low, high)), rate = METHODS[c.method].rates(own_settings(c)), c.learning_rate
    if rate is None or low <= rate <= high or assets.is_demo_model(c.model):
        return []
    known = f"{c.method} is known to work from {low:g} to {high:g}"
    return [Finding("learning_rate", f"{rate:g} is an unusual value: {known}")]


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
    found = [assets.locate(expanded(item), stands_for) for item in as_list(data)]
    return found if isinstance(data, list) else found[0] if found else None


def as_list(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def expanded(path: str) -> str:
    """The path with ~ and $NAME replaced: in a config, or after `key=`, no shell has expanded them."""
    return os.path.expanduser(os.path.expandvars(path))
