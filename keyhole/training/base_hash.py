"""The content hash of the original model, computed in the background.

Checkpoints and journals identify their base model by this hash (disk/weights_hash.py). Computing it reads every byte of
the weights: half a second for 135M parameters, several seconds for 7B. The hash is needed only when the journal is
opened, so threads compute it while torch is imported, the data are read and the weights are loaded; zlib and file reads
release the GIL. The weights are then loaded from the page cache.

Only a directory with safetensors is hashed early. A hub id may have to be downloaded first, and .bin files need torch,
which is not imported yet: these are hashed when the result is requested.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from keyhole.disk.weight_files import is_pickled
from keyhole.disk.weights_hash import Stopped, content_hash
from keyhole.errors import UserError
from keyhole.model.structure.source import find_directory


def model_hash(model: str) -> str | None:
    """The content hash of the original model of a run; None if its files have none."""
    try:
        return content_hash(find_directory(model))
    except UserError:
        return None


class BaseHash:
    """The hash of one model; the computation starts at once where possible."""

    def __init__(self, model: str) -> None:
        self.model, self.stopped = model, threading.Event()
        self.early: Future[str] | None = None
        if Path(model).is_dir() and not is_pickled(Path(model)):
            self.early = ThreadPoolExecutor(1, "keyhole-hash").submit(content_hash, Path(model), self.stopped.is_set)

    def result(self) -> str | None:
        """Waits for the hash; None if the files have none."""
        try:
            return model_hash(self.model) if self.early is None else self.early.result()
        except (UserError, Stopped):
            return None

    def stop(self) -> None:
        """Cancels the computation: the threads end after the piece that they are reading."""
        self.stopped.set()
