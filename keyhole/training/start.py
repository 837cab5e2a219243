"""How a run starts: the config, the existing files, and all checks that need neither data nor model.

    config -> output_dir, lock -> resume point -> files of the data   here, without torch: errors within a second
    data -> model, method -> start block -> directory -> journal -> loop                       build.py, with torch

Importing torch and transformers takes seconds, so this file imports neither, directly or indirectly
(tests/training/test_start.py checks which modules are imported at that moment).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.checkpoint.resume import Origin, check_original, find_origin
from keyhole.config import TrainConfig
from keyhole.config.fields import own_settings
from keyhole.data.settings import DataSettings, data_settings
from keyhole.data.sources import check_sources
from keyhole.disk.weight_files import weight_files
from keyhole.errors import UserError
from keyhole.machine.collector import HEAVY, imports
from keyhole.methods import METHODS
from keyhole.model.structure.source import check_directory
from keyhole.ranks import Ranks
from keyhole.training import trackers
from keyhole.training.display import Display, Waiting
from keyhole.training.resume import model_hash, resume_lines
from keyhole.training.rundir import Lock, RunDir, inspect, locked

if TYPE_CHECKING:
    from keyhole.data.run import Data

IMPORTS = "importing torch and transformers"


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


@dataclass(frozen=True)
class Request:
    """A config, checked as far as possible without reading data and model, and where its run begins."""

    config: TrainConfig
    directory: RunDir
    lock: Lock
    origin: Origin
    notes: list[str]
    settings: DataSettings
    parts: Parts


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
            origin = parts.ranks.from_leader(
                lambda: find_origin(resume, directory.place(), METHODS[config.method].journaled)
            )
            if leads:
                check_original(origin, config.model, own_settings(config).light)
            notes = resume_lines(resume, origin, config) if leads else []
            check_origin(config, origin)
            settings = data_settings(config, None if origin.state is None else origin.loader)
            check_sources(settings)
            name = prepare_push(config, dry_run) if leads and config.push_to_hub else None
        with parts.waiting.phase(IMPORTS, now=HEAVY not in sys.modules), imports(parts.own_process):
            from keyhole.training import build
        code = build.run(Request(config, directory, lock, origin, notes, settings, parts), dry_run)
        if code == 0 and name is not None and not dry_run:
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


def check_origin(config: TrainConfig, origin: Origin) -> None:
    """Checks that the files that the weights come from are there, and are the run's."""
    row, path = METHODS[config.method], origin.choice.path
    own = own_settings(config)
    if path is not None and not path.is_dir():
        raise UserError(
            f"output_dir: {path}, from which the leader goes on, is not on this machine: copy it here, "
            "or use a file system that all machines see"
        )
    check_directory(config.model)
    if (path is None or row.from_original(own)) and Path(config.model).is_dir():
        weight_files(Path(config.model))


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
