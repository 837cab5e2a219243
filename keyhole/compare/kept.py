"""What the runs of one process share, so that a run starts within a second.

    data       read, drawn and tokenised once per task, seed and length; each run gets its own loader
    hashes     of a model's content: computed once; of data: once for all batch sizes
    day        for chat templates that print it: the day the comparison began, so that all runs have the same tokens

The model is built again for every run: a method leaves hooks, adapters and state in it, and building it (0.3 s for 30
layers) is cheaper than making sure that they are gone.
"""

import copy
import hashlib
import json
from dataclasses import replace

from keyhole.config import TrainConfig
from keyhole.config.data import data_settings
from keyhole.data.run import Data, load_data
from keyhole.data.settings import DataSettings
from keyhole.training.resume import model_hash


class Kept:
    """Data and hashes, each loaded or computed once."""

    def __init__(self) -> None:
        self.data: dict[str, Data] = {}
        self.hashes: dict[str, str | None] = {}
        self.prints: dict[str, str] = {}
        self.day: str | None = None

    def model_hash(self, model: str) -> str | None:
        """The content hash of one of the compared models."""
        if model not in self.hashes:
            self.hashes[model] = model_hash(model)
        return self.hashes[model]

    def load_data(self, settings: DataSettings) -> Data:
        """The data of a run, with a loader that begins at the first row."""
        if settings.template_date is None:
            settings = replace(settings, template_date=self.day)
        key = repr(settings)
        if key not in self.data:
            self.data[key] = replace(load_data(settings), tokenizer=None)  # a run may give its own another template
        found = self.data[key]
        return replace(found, train=copy.copy(found.train))

    def data_hash(self, config: TrainConfig) -> str:
        """8 hex digits that change with any row of train, dev or test, and with the task file."""
        try:
            settings = data_settings(config)
            key = repr(replace(settings, batch_size=1, gradient_accumulation_steps=1))
            if key not in self.prints:
                data = self.load_data(settings)
                held_out = "" if data.eval.dataset is None else data.eval.dataset.fingerprint
                told = json.dumps([data.train.fingerprint, held_out, questions(data)])
                self.prints[key] = hashlib.blake2b(told.encode(), digest_size=4).hexdigest()
        except Exception:  # a grid point that its data do not fit (max_length): the run itself reports it
            return "unread"
        return self.prints[key]


def questions(data: Data) -> list[list[str]]:
    """The fingerprints of the questions of dev and test, and of their task files."""
    return [
        [task.name, task.fingerprint, "" if task.spec is None else task.spec.fingerprint]
        for task in (*data.dev, *data.test)
    ]
