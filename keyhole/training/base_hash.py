"""The content hash of the original model, computed in the background.

Checkpoints and journals identify their base model by this hash (disk/weights_hash.py). Computing it reads every byte of
the weights: half a second for 135M parameters, several seconds for 7B. The hash is needed only when the journal is
opened, so threads compute it while torch is imported, the data are read and the weights are loaded; zlib and file reads
release the GIL. The weights are then loaded from the page cache.

Only a directory with safetensors is hashed early. A hub id may have to be downloaded first, and .bin files need torch,
which is not imported yet: these are hashed when the result is requested.
"""

import threading
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
        """Waits for the hash; None if the files have none."""
        if self.thread is None:
            return model_hash(self.model)
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.found

    def stop(self) -> None:
        """Cancels the computation: the threads end after the piece that they are reading."""
        self.stopped.set()
