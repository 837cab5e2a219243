"""Ranks that would train something else than the leader, or save it elsewhere, are refused before the first step.

Every machine has its own copy of the config, the data and the model, or sees one copy through a shared file system.
Nothing later would notice a copy that is older: losses would be added up all the same. So ranks compare

    config     setting by setting
    data       fingerprints of the rows to train on, of those to evaluate on, and of the questions of tasks
    weights    sizes and samples of the files they are loaded from: 32 pieces of 4 KiB per file, its header among them.
               Another model, revision or step of training differs in nearly every piece; to read all of the bytes would
               take as long as the load
    directory  where every rank has something to write (its part of the weights) or to read (the best ones), and a run
               would end in vain if it were another directory under the same name: the leader's lock is seen from there

The bytes exchanged are a few hundred per rank, once.
"""

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

from keyhole.config import TrainConfig
from keyhole.config.types import to_dict
from keyhole.data.run import Data
from keyhole.disk.json_text import Json
from keyhole.errors import UserError
from keyhole.model.structure.source import find_directory
from keyhole.ranks import Ranks

PIECES, PIECE_BYTES = 32, 4096
SHOWS_S = 10.0
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "config.json")


def same_everywhere(ranks: Ranks, config: TrainConfig, data: Data) -> None:
    """Config and data; called by all ranks."""
    if not ranks.several:
        return
    ranks.set_limit(config.rank_timeout)
    own = settings(replace(config, data_cache=None))
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


def settings(config: TrainConfig) -> Json:
    """Dotted key -> value."""
    flat: Json = {}
    for key, value in to_dict(config).items():
        flat |= {f"{key}.{name}": its for name, its in value.items()} if isinstance(value, dict) else {key: value}
    return flat


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
