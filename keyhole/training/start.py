"""How a run starts: the config, the existing files, and all checks that need neither data nor model.

    config -> output_dir, lock -> resume point -> files of the data   here, without torch: errors within a second
    data -> model, method -> start block -> directory -> journal -> loop                       build.py, with torch

Resuming. Safe settings control length, learning rate, reporting and paths; new values apply from the next step on and
are printed. The others define the run (model, data, batches, seed, method): with another value the steps so far and the
steps to come would not be one run, so changes are refused, all in one message, by name. Sections of unused methods are
ignored. Model and data are identified by content, so a directory may be moved. The model's weights are compared by hash
here; training data are compared by their tokens when they are read (data/batches.py), which also detects another
tokenizer.

Ranks. Every machine has its own copy of the config, the data and the model, or sees one copy through a shared file
system. Nothing later would notice a copy that is older: losses would be added up all the same. So ranks compare

    config     setting by setting
    data       fingerprints of the rows to train on, of those to evaluate on, and of the questions of tasks
    weights    sizes and samples of the files they are loaded from: 32 pieces of 4 KiB per file, its header among them.
               Another model, revision or step of training differs in nearly every piece; to read all of the bytes would
               take as long as the load
    directory  where every rank has something to write (its part of the weights) or to read (the best ones), and a run
               would end in vain if it were another directory under the same name: the leader's lock is seen from there

Importing torch and transformers takes seconds, so this file imports neither, directly or indirectly
(tests/training/test_start.py checks which modules are imported at that moment).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.checkpoint.resume import Origin, check_original, find_origin
from keyhole.checkpoint.state import STATE, State
from keyhole.config import TrainConfig, to_dict
from keyhole.config.fields import own_settings, sections
from keyhole.data.settings import DataSettings, data_settings
from keyhole.data.sources import check_sources
from keyhole.disk.json_text import Json
from keyhole.disk.weight_files import content_hash, weight_files
from keyhole.errors import UserError
from keyhole.machine.collector import HEAVY, imports
from keyhole.machine.host import versions
from keyhole.methods import METHODS
from keyhole.model.structure.config_files import base_config, config_fault
from keyhole.model.structure.source import check_directory, find_directory
from keyhole.ranks import Ranks
from keyhole.training import trackers
from keyhole.training.display import Display, Waiting
from keyhole.training.rundir import RunDir, inspect, locked

if TYPE_CHECKING:
    from keyhole.data.run import Data

IMPORTS = "importing torch and transformers"
SAFE = {
    "max_steps", "num_train_epochs", "max_minutes", "learning_rate", "lr_scheduler_type", "min_lr_ratio",
    "warmup_ratio", "warmup_steps", "weight_decay", "max_grad_norm", "num_eval", "test_task", "eval_data", "eval_steps",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience", "save_model",
    "save_steps", "save_total_limit", "logging_steps", "report_to", "sample_answers", "output_dir", "data_cache",
    "device", "placement", "gpu_memory", "micro_batch_size", "background_save", "journal_sync", "rank_timeout",
    "push_to_hub", "hub_model_id", "hub_private_repo",
}  # fmt: skip
DATA = ("train_data", "task_data")  # their content is checked when they are read
SAFE |= {f"{row.section}.{key}" for row in METHODS.values() for key in row.may_change}
PIECES, PIECE_BYTES = 32, 4096
SHOWS_S = 10.0
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "config.json")


def model_hash(model: str) -> str | None:
    """The content hash of the original model of a run; None if its files have none."""
    try:
        return content_hash(find_directory(model))
    except UserError:
        return None


@dataclass(frozen=True)
class Parts:
    """Parts that several runs of one process may share (keyhole/compare does), and permissions. None: the default of a
    single run. own_process: nothing else uses this process (machine/collector.py)."""

    load_data: Callable[[DataSettings], Data] | None = None
    display: Callable[[int, int], Display] = Display
    model_hash: Callable[[str], str | None] = model_hash
    waiting: Waiting = field(default_factory=Waiting)
    allow_code_execution: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    own_process: bool = False


def train(config: TrainConfig, *, resume: str | None = None, dry_run: bool = False, parts: Parts | None = None) -> int:
    """Trains as the (resolved) config says and returns the exit code: 0, or 130 when interrupted after a clean save.

    resume: None starts a new run; "" (or "auto", "last") resumes from the newest checkpoint in output_dir; a
    path, from that checkpoint. dry_run checks config, data, model (its weights by the headers of their files) and
    output_dir, prints the start block, and stops.
    """
    parts = parts or Parts()
    leads = parts.ranks.is_leader  # the other ranks follow its commands, and write no file of the run by themselves
    if dry_run and not leads:
        return 0
    check_ranks(config, parts.ranks)
    parts = replace(parts, ranks=Ranks()) if dry_run else parts
    parts = parts if leads else replace(parts, waiting=Waiting(silent=True))
    trackers.require(config.report_to if leads else [])
    directory = RunDir(Path(config.output_dir))
    with locked(directory.lock) as lock:
        if leads:
            inspect(config.output_dir, resume is not None, None if dry_run else lock)
        with parts.waiting.phase("checking"):
            row = METHODS[config.method]
            origin = parts.ranks.from_leader(lambda: find_origin(resume, directory.place(), row.journaled))
            from_original = row.from_original(own_settings(config))
            if leads:
                check_original(origin, config.model, from_original)
            notes = resume_lines(resume, origin, config) if leads else []
            check_directory(config.model)
            if (origin.choice.path is None or from_original) and Path(config.model).is_dir():
                weight_files(Path(config.model))  # refuses missing ones
            settings = data_settings(config, None if origin.state is None else origin.loader)
            check_sources(settings)
            name = prepare_push(config, dry_run) if leads and config.push_to_hub else None
        with parts.waiting.phase(IMPORTS, now=HEAVY not in sys.modules), imports(parts.own_process):
            from keyhole.training import build
        code = build.run(config, directory, lock, origin, notes, settings, parts, dry_run)
        if code == 0 and name and not dry_run:
            push(directory.root, name, config.hub_private_repo)
        return code


def check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Refuses settings that several ranks do not support."""
    if not ranks.several:
        return
    if METHODS[config.method].ranks is None:
        able = ", ".join(name for name, each in METHODS.items() if each.ranks is not None)
        raise UserError(
            f"method={config.method} trains in one process: start it without torchrun; on several ranks: {able}"
        )
    count = config.gradient_accumulation_steps
    if count % ranks.size:
        raise UserError(
            f"gradient_accumulation_steps={count}: it counts the micro-batches of a step over all ranks, and must be a "
            f"multiple of their number, {ranks.size}; set it to {-(-count // ranks.size) * ranks.size} (lower "
            "batch_size to keep the rows of a step), or start another number of processes"
        )


def prepare_push(config: TrainConfig, dry_run: bool) -> str:
    """The hub name under which the model will be published; problems are reported before training."""
    from keyhole.hub.push import check_id, prepare

    name = config.hub_model_id or Path(config.output_dir).resolve().name
    check_id(name)
    return name if dry_run else prepare(name, config.hub_private_repo)


def push(root: Path, name: str, private: bool | None) -> None:
    from keyhole.hub import push as hub

    def say(line: str) -> None:
        with suppress(OSError):  # the output may be closed
            print(line, flush=True)

    try:
        say(f"pushed: {hub.push(root, name, private=private, say=say)}")
    except UserError as error:
        raise UserError(f"{error}. The model is in {root}; push it later: keyhole push {root} {name}") from error


def flat_config(config: TrainConfig) -> Json:
    """Dotted key -> plain value, for the top level and the section of the method."""
    values = to_dict(config)
    own = METHODS[config.method].section
    flat = {f"{own}.{key}": value for key, value in values[own].items()}
    plain: Json = json.loads(json.dumps({key: values[key] for key in values if key not in sections()} | flat))
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
            refused.append(f"  {key}: the run has {_shown(before)}, the config now says {_shown(after)}")
    if refused:
        fix = "set them back, or start a new run in another output_dir"
        raise UserError("\n".join([f"--resume: these settings cannot change within a run; {fix}", *refused]))
    return lines


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
    changes = apply_changes(state, config, origin.step, None if origin.original is None else origin.original.base)
    lines += [f"resume: {change}" for change in changes]
    with suppress(UserError):  # a config.json that cannot be read is not needed
        then_base = None if origin.original is None else origin.original.base_config
        if Path(config.model).is_dir() and (fault := config_fault(then_base, base_config(config.model))):
            lines.append(f"resume: model={config.model} {fault}; the run goes on with that of {choice.path}")
    then, now = state.versions, versions()
    other = [f"{name} {then.get(name)} -> {now[name]}" for name in ("torch", "keyhole") if then.get(name) != now[name]]
    return lines + [f"resume: {change}: equal to the last bit only with the same version" for change in other]


def split_lines(state: State | None, pass_tokens: int | None) -> list[str]:
    """A line where a resumed run splits its micro-batches otherwise than before."""
    before = None if state is None else state.pass_tokens
    if state is None or before == pass_tokens:
        return []
    then, now = (f"of at most {size:,} tokens" if size else "whole micro-batches" for size in (before, pass_tokens))
    return [f"resume: passes were {then}, and are {now} now: sums are rounded otherwise from here on"]


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
    taken, end_s = ranks.from_leader(lock.read_bytes), time.monotonic() + SHOWS_S
    while not (sees := lock.is_file() and lock.read_bytes() == taken) and time.monotonic() < end_s:
        time.sleep(0.1)  # a file may take seconds to show on another machine
    for rank, other_sees in enumerate(ranks.objects(sees)):
        if not other_sees:
            raise UserError(
                f"output_dir: rank {rank} does not see what the leader has written into {lock.parent.parent}; every "
                "rank reads or writes a part of the checkpoints: use a file system that all machines see"
            )


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
