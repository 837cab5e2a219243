"""Which settings may change when a run is resumed.

Safe settings control length, learning rate, reporting and paths; new values apply from the next step on and are
printed. The others define the run (model, data, batches, seed, method): with another value the steps so far and the
steps to come would not be one run, so changes are refused, all in one message, by name. Sections of unused methods are
ignored.

Model and data are identified by content, so a directory may be moved. The model's weights are compared by hash here;
training data are compared by their tokens when they are read (data/batches.py), which also detects another tokenizer.
"""

import json

from keyhole.checkpoint.resume import Origin
from keyhole.checkpoint.state import STATE, State
from keyhole.config import TrainConfig, to_dict
from keyhole.config.fields import sections
from keyhole.disk.json_text import Json
from keyhole.disk.weights_hash import content_hash
from keyhole.errors import UserError
from keyhole.machine.probe import versions
from keyhole.methods import METHODS
from keyhole.model.structure.source import find_directory

SAFE = {
    "max_steps", "num_train_epochs", "max_minutes", "learning_rate", "lr_scheduler_type", "min_lr_ratio",
    "warmup_ratio", "warmup_steps", "weight_decay", "max_grad_norm", "num_eval", "test_task", "eval_data", "eval_steps",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience", "save_model",
    "save_steps", "save_total_limit", "logging_steps", "report_to", "sample_answers", "output_dir", "data_cache",
    "device", "placement", "gpu_memory", "background_save", "journal_sync", "rank_timeout", "push_to_hub",
    "hub_model_id", "hub_private_repo",
}  # fmt: skip
DATA = ("train_data", "task_data")  # their content is checked when they are read
SAFE |= {f"{row.section}.{key}" for row in METHODS.values() for key in row.may_change}


def flat_config(config: TrainConfig) -> Json:
    """Dotted key -> plain value, for the top level and the section of the method."""
    values = to_dict(config)
    own = METHODS[config.method].section
    flat = {key: value for key, value in values.items() if key not in sections()}
    flat |= {f"{own}.{key}": value for key, value in values[own].items()}
    plain: Json = json.loads(json.dumps(flat))
    return plain


def apply_changes(state: State, config: TrainConfig, done: int | None = None, base: str | None = None) -> list[str]:
    """A line for every safe setting that changed since the checkpoint; UserError names those that may not.

    done: steps done, if a journal leads further than the checkpoint; base: the hash of the run's original model."""
    next_step = (state.step if done is None else done) + 1
    lines, refused = [], []
    now = flat_config(config)
    for key in sorted(now) if state.config.get("method") == config.method else ["method"]:
        before, after = state.config.get(key), now[key]
        if before == after:
            continue
        if key in DATA or (key == "model" and _same_model(after, base)):
            lines.append(f"{key}: {_shown(before)} -> {_shown(after)}, of the same content")
        elif key in SAFE:
            lines.append(f"{key}: {_shown(before)} -> {_shown(after)}, from step {next_step} on")
        else:
            why = f" ({fault})" if key == "model" and (fault := _unreadable(str(after))) else ""
            refused.append(f"  {key}: the run has {_shown(before)}, the config now says {_shown(after)}{why}")
    if refused:
        fix = "set them back, or start a new run in another output_dir"
        raise UserError("\n".join([f"--resume: these settings cannot change within a run; {fix}", *refused]))
    return lines


def _same_model(model: str, base: str | None) -> bool:
    return base is not None and _unreadable(model) is None and content_hash(find_directory(model)) == base


def _unreadable(model: str) -> str | None:
    """Why a model cannot be compared; None if it can."""
    try:
        content_hash(find_directory(model))
    except UserError as error:
        return str(error)
    return None


def _shown(value: object) -> str:
    """A value as written in a config: null, true."""
    return value if isinstance(value, str) else json.dumps(value)


def resume_lines(resume: str | None, origin: Origin, config: TrainConfig) -> list[str]:
    """The lines about a resume: its starting point, damaged files, changed settings."""
    if resume is None:
        return []
    choice, state = origin.choice, origin.state
    passed = [f"resume: {path} is damaged and passed over: {fault}" for path, fault in choice.damaged.items()]
    passed += [
        f"resume: {path} has no {STATE}: it is none of this run's checkpoints, and is passed over (a save of that step "
        f"would rename it to {path.name}.kept)"
        for path in choice.strange
    ]
    if state is None:
        return [f"resume: no checkpoint in {config.output_dir} yet, so this is a new run", *passed, *origin.notes]
    lines = [f"resume: from {choice.path or config.model}, {state.step} steps done", *passed, *origin.notes]
    if origin.tail:
        lines.append(f"resume: the journal has {len(origin.tail)} steps more, up to step {origin.step}; replaying them")
    lines += [f"resume: {change}" for change in apply_changes(state, config, origin.step, origin.base)]
    then, now = state.versions, versions()
    other = [f"{name} {then[name]} -> {now[name]}" for name in ("torch", "keyhole") if then.get(name) != now[name]]
    return lines + [f"resume: {change}: equal to the last bit only with the same version" for change in other]
