"""How a run starts, from top to bottom: the config, the existing files, the parts of the run.

    config -> output_dir, lock -> resume point -> files of the data   here, without torch: errors within a second
    data -> model, method -> start block -> directory -> journal -> loop                       build.py, with torch

Importing torch and transformers takes seconds, so this file imports neither, directly or indirectly. All checks that do
not need them are made first (tests/training/test_start.py checks which modules are imported at that moment).
"""

import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from keyhole.checkpoint.journal.resume_point import check_base, check_original, find_origin
from keyhole.config import TrainConfig, resolve
from keyhole.config.data import data_settings
from keyhole.data.sources import check_sources
from keyhole.disk.weight_files import weight_files
from keyhole.errors import UserError
from keyhole.machine.collector import HEAVY, imports
from keyhole.methods import METHODS
from keyhole.model.structure.source import check_directory
from keyhole.ranks import Ranks
from keyhole.training import rundir, trackers
from keyhole.training.base_hash import BaseHash, model_hash
from keyhole.training.display import open_missing_streams
from keyhole.training.lock import Lock, locked
from keyhole.training.request import Parts, Request
from keyhole.training.resume import resume_lines
from keyhole.training.waiting import Waiting

IMPORTS = "importing torch and transformers"


def train(config: TrainConfig, *, resume: str | None = None, dry_run: bool = False, parts: Parts | None = None) -> int:
    """Trains as the config says and returns the exit code: 0, or 130 when interrupted after a clean save.

    resume: None starts a new run; "" (or "auto", "last") resumes from the newest checkpoint in output_dir; a
    path, from that checkpoint. dry_run checks config, data, model (its weights by the headers of their files) and
    output_dir, prints the start block, and stops.
    """
    open_missing_streams()
    config, _ = resolve(config)  # done by the command line; needed for a config made in Python
    parts = parts or Parts()
    check_ranks(config, parts.ranks)
    if not parts.ranks.is_leader:
        return 0 if dry_run else follow(config, resume, parts)
    parts = replace(parts, ranks=Ranks()) if dry_run else parts
    trackers.require(config.report_to)
    directory = rundir.inspect(config.output_dir, resume is not None)
    with locked(directory.lock) as lock, ExitStack() as opened:
        if not dry_run:
            lock.take()
            rundir.restore(directory)
            rundir.inspect(config.output_dir, resume is not None)  # again: another run may have written here meanwhile
        with parts.waiting.phase("checking"):
            request = check_request(config, directory, resume, parts)
            name = _prepare_push(config, dry_run)
        if request.origin.state is None and not dry_run and parts.model_hash is None:
            base = BaseHash(config.model)
            opened.callback(base.stop)
            request = replace(request, base=base.result)
        with parts.waiting.phase(IMPORTS, now=HEAVY not in sys.modules), imports(parts.own_process):
            from keyhole.training import build
        job = build.find_job(request)
        code = build.dry_run(job) if dry_run else build.build_run(job, lock).go()
        if code == 0 and name is not None:
            _push(directory.root, name, config.hub_private_repo)
        return code


def _prepare_push(config: TrainConfig, dry_run: bool) -> str | None:
    """The hub name under which the model will be published; problems are reported before training."""
    if not config.push_to_hub:
        return None
    from keyhole.hub.push import check_id, prepare

    name = config.hub_model_id or Path(config.output_dir).resolve().name
    check_id(name)
    return None if dry_run else prepare(name, config.hub_private_repo)


def _push(root: Path, name: str, private: bool | None) -> None:
    from keyhole.hub.push import push

    def say(line: str) -> None:
        with suppress(OSError):  # the output may be closed
            print(line, flush=True)

    try:
        say(f"pushed: {push(root, name, private=private, say=say)}")
    except UserError as error:
        raise UserError(f"{error}. The model is in {root}; push it later: keyhole push {root} {name}") from error


def follow(config: TrainConfig, resume: str | None, parts: Parts) -> int:
    """The same on a rank that is not the leader: it executes the leader's commands, and writes no file of the run by
    itself."""
    directory, parts = rundir.RunDir(Path(config.output_dir)), replace(parts, waiting=Waiting(silent=True))
    request = check_request(config, directory, resume, parts)
    with imports(parts.own_process):
        from keyhole.training import build
    return build.build_run(build.find_job(request), Lock(directory.lock)).go()


def check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Refuses settings that several ranks do not support."""
    count, row = config.gradient_accumulation_steps, METHODS[config.method]
    if not ranks.several:
        return
    if row.ranks is None:
        able = ", ".join(name for name, each in METHODS.items() if each.ranks is not None)
        raise UserError(
            f"method={config.method} trains in one process: start it without torchrun; on several ranks: {able}"
        )
    if count % ranks.size:
        raise UserError(
            f"gradient_accumulation_steps={count}: it counts the micro-batches of a step over all ranks, and must be a "
            f"multiple of their number, {ranks.size}; set it to {-(-count // ranks.size) * ranks.size} (lower "
            "batch_size to keep the rows of a step), or start another number of processes"
        )


def check_request(config: TrainConfig, directory: rundir.RunDir, resume: str | None, parts: Parts) -> Request:
    """Finds the resume point, and checks that model and data exist. Reads no data and writes nothing."""
    ranks, row = parts.ranks, METHODS[config.method]
    origin = ranks.from_leader(lambda: find_origin(resume, directory.place(), row.journaled))
    if origin.tail and origin.choice.path is None and ranks.is_leader:
        assert origin.journal is not None  # its records are the tail
        check_base(origin.journal, config.model)
    if origin.choice.path is not None and not origin.choice.path.is_dir():
        raise UserError(
            f"output_dir: {origin.choice.path}, from which the leader goes on, is not on this machine: copy it here, "
            "or use a file system that all machines see"
        )
    notes = resume_lines(resume, origin, config) if ranks.is_leader else []
    check_directory(config.model)
    own = getattr(config, row.section)
    from_model = origin.choice.path is None or row.from_original(own)
    if origin.choice.path is not None and row.light(own) and ranks.is_leader:
        check_original(origin, config.model)
    if from_model and Path(config.model).is_dir():
        weight_files(Path(config.model))
    settings = data_settings(config, None if origin.state is None else origin.loader)
    check_sources(settings)
    base = lambda: (parts.model_hash or model_hash)(config.model)  # noqa: E731
    return Request(config, directory, origin, notes, settings, parts, base)
