"""The content hash of the model that a run begins with, computed while other things happen.

Checkpoints and journals name their base model by it (disk/weights_hash.py), and for that every byte of the weights is
read: half a second for 135M parameters, several for 7B. Nothing waits for the hash before the journal is opened, so it
is computed by threads while torch is imported, the data are read and the weights are loaded; zlib and the disk let
other threads run. The load then finds the files in the page cache.

Only a directory with safetensors is begun early. A hub id may have to be downloaded first, and .bin files are read by
torch, which is not there yet: those are hashed when they are asked for.
"""

import threading
from pathlib import Path

from keyhole.disk.weight_files import is_pickled
from keyhole.disk.weights_hash import Stopped, content_hash
from keyhole.errors import UserError
from keyhole.model.structure.source import find_directory


def model_hash(model: str) -> str | None:
    """The content hash of the model that a run begins with; None where its files have none."""
    try:
        return content_hash(find_directory(model))
    except UserError:
        return None


class BaseHash:
    """The hash of one model, begun at once where that is possible."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.found: str | None = None
        self.error: Exception | None = None
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None
        if Path(model).is_dir() and not is_pickled(Path(model)):
            self.thread = threading.Thread(target=self._find, name="keyhole-hash", daemon=True)
            self.thread.start()

    def _find(self) -> None:
        try:
            self.found = content_hash(Path(self.model), self.stopped.is_set)
        except (UserError, Stopped):
            pass
        except Exception as error:
            self.error = error

    def result(self) -> str | None:
        """Waits for the hash; None where the files have none."""
        if self.thread is None:
            return model_hash(self.model)
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.found

    def stop(self) -> None:
        """Nobody will ask any more: the threads end after the piece that they read."""
        self.stopped.set()
