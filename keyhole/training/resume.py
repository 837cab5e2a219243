"""Whether this is the same run: which settings may change when it is resumed, which original model it began with, and
whether all ranks train the same.

Resuming. Safe settings control length, learning rate, reporting and paths; new values apply from the next step on and
are printed. The others define the run (model, data, batches, seed, method): with another value the steps so far and the
steps to come would not be one run, so changes are refused, all in one message, by name. Sections of unused methods are
ignored. Model and data are identified by content, so a directory may be moved. The model's weights are compared by hash
here; training data are compared by their tokens when they are read (data/batches.py), which also detects another
tokenizer.

The hash. Checkpoints and journals identify their base model by its content (disk/weight_files.py).

Ranks. Every machine has its own copy of the config, the data and the model, or sees one copy through a shared file
system. Nothing later would notice a copy that is older: losses would be added up all the same. So ranks compare

    config     setting by setting
    data       fingerprints of the rows to train on, of those to evaluate on, and of the questions of tasks
    weights    sizes and samples of the files they are loaded from: 32 pieces of 4 KiB per file, its header among them.
               Another model, revision or step of training differs in nearly every piece; to read all of the bytes would
               take as long as the load
    directory  where every rank has something to write (its part of the weights) or to read (the best ones), and a run
               would end in vain if it were another directory under the same name: the leader's lock is seen from there

The bytes exchanged are a few hundred per rank, once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.checkpoint.resume import Origin
from keyhole.checkpoint.state import STATE, State
from keyhole.config import TrainConfig, to_dict
from keyhole.config.fields import sections
from keyhole.disk.json_text import Json
from keyhole.disk.weight_files import content_hash
from keyhole.errors import UserError
from keyhole.machine.probe import versions
from keyhole.methods import METHODS
from keyhole.model.structure.source import find_directory
from keyhole.ranks import Ranks

if TYPE_CHECKING:
    from keyhole.data.run import Data

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
        if key in DATA or (key == "model" and base is not None and model_hash(str(after)) == base):
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


def model_hash(model: str) -> str | None:
    """The content hash of the original model of a run; None if its files have none."""
    try:
        return content_hash(find_directory(model))
    except UserError:
        return None


PIECES, PIECE_BYTES = 32, 4096
SHOWS_S = 10.0
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "config.json")


def same_everywhere(ranks: Ranks, config: TrainConfig, data: Data) -> None:
    """Config and data; called by all ranks."""
    if not ranks.several:
        return
    ranks.set_limit(config.rank_timeout)
    own = flat_config(replace(config, data_cache=None))
    _compare(ranks, own, "start all ranks with the same config and the same key=value")
    eval_rows = None if data.eval.dataset is None else data.eval.dataset.fingerprint
    questions = [task.fingerprint for task in (*data.dev, *data.test)]
    found = {"train_data": data.train.fingerprint, "eval_data": eval_rows, "task": questions}
    _compare(ranks, found, "these are hashes of what was read; the files must be the same everywhere")


def same_weights(ranks: Ranks, source: str) -> None:
    """The model that was loaded from `source`, a directory or a hub id; called by all ranks."""
    if not ranks.several:
        return
    text = f"these are hashes of samples of the files in {source}, which must be the same everywhere"
    _compare(ranks, {"model": sampled(find_directory(source))}, text)


def same_directory(ranks: Ranks, lock: Path) -> None:
    """output_dir, in which the leader has taken its lock; called by all ranks."""
    if not ranks.several:
        return
    taken = ranks.from_leader(lock.read_bytes)
    faults = ranks.objects(None if ranks.is_leader else _fault(lock, taken))
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise UserError(
                f"output_dir: rank {rank} {fault} {lock.parent.parent}; every rank reads or writes a part of the "
                "checkpoints: use a file system that all machines see"
            )


def _fault(lock: Path, taken: bytes) -> str | None:
    """What is wrong with the directory as this rank sees it; a file may take seconds to show on another machine."""
    end_s = time.monotonic() + SHOWS_S
    while not (lock.is_file() and lock.read_bytes() == taken):
        if time.monotonic() > end_s:
            return "does not see what the leader has written into"
        time.sleep(0.1)
    return None if os.access(lock.parent.parent, os.W_OK | os.X_OK) else "may not write to"


def _compare(ranks: Ranks, own: Json, text: str) -> None:
    everyone = ranks.objects(own)
    for rank, its in enumerate(everyone):
        for key in sorted({*its, *everyone[0]}):
            here, there = its.get(key), everyone[0].get(key)
            if here != there:
                raise UserError(f"{key} differs between ranks, {here} on rank {rank} and {there} on rank 0: {text}")


def sampled(directory: Path) -> str:
    """16 hex digits of the sizes and of samples of the files that a model is loaded from."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted({path for pattern in WEIGHTS for path in directory.glob(pattern)}):
        size_bytes = path.stat().st_size
        digest.update(f"{path.name} {size_bytes}\n".encode())
        with path.open("rb") as file:
            for i in range(PIECES):
                file.seek(max(0, size_bytes - PIECE_BYTES) * i // (PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()
