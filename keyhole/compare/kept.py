"""What the runs of one process share, so that a run starts in a second: weights, data, hashes. Kernels stay by
themselves: those that were compiled belong to the process.

    weights    files of the compared models stay open and mapped; loading copies from memory (disk/weight_files.py)
    data       read, drawn and tokenised once per task, seed and length; a run gets a loader of its own
    hashes     of a model's content: once; of data: once for all batch sizes
    day        that chat templates print: the one on which the comparison began, so that all runs have the same tokens

A model itself is built anew for every run. A method leaves hooks, adapters and state in it, and what it costs to build
(0.3 s for 30 layers) is not worth the doubt.
"""

import copy
import gc
import hashlib
import json
from dataclasses import replace
from typing import Any

import torch

from keyhole.data.run import Data, load_data
from keyhole.data.settings import DataSettings
from keyhole.disk.weight_files import Shards, kept_open
from keyhole.loading import load
from keyhole.model.model import Model
from keyhole.training.base_hash import model_hash


class Kept:
    """Weights, data and hashes, each had once."""

    def __init__(self) -> None:
        self.shards: Shards = {}
        self.data: dict[str, Data] = {}
        self.hashes: dict[str, str | None] = {}
        self.prints: dict[str, str] = {}
        self.day: str | None = None
        self.models: set[str] = set()  # whose files stay open

    def model_hash(self, model: str) -> str | None:
        """The content hash of a model, which is one of the compared ones."""
        self.models.add(model)
        if model not in self.hashes:
            self.hashes[model] = model_hash(model)
        return self.hashes[model]

    def load_data(self, settings: DataSettings) -> Data:
        """The data of a run, with a loader that begins at the first row."""
        if settings.template_date is None:
            settings = replace(settings, template_date=self.day)
        key = repr(settings)
        if key not in self.data:
            self.data[key] = load_data(settings)
        found = self.data[key]
        return replace(found, train=copy.copy(found.train))

    def data_hash(self, settings: DataSettings) -> str:
        """8 hex digits that change with any row of train, dev or test, and with what the task file says."""
        key = repr(replace(settings, batch_size=1, gradient_accumulation_steps=1))
        if key not in self.prints:
            data = self.load_data(settings)
            held_out = "" if data.eval.dataset is None else data.eval.dataset.fingerprint
            self.prints[key] = short_hash([data.train.fingerprint, held_out, questions(data)])
        return self.prints[key]

    def load(self, source: str, **how: Any) -> Model:
        """A model; the files of a checkpoint are not kept."""
        if source not in self.models:
            return load(source, **how)
        with kept_open(self.shards):
            return load(source, **how)


def questions(data: Data) -> list[list[str]]:
    """What the questions of dev and test are known by: their fingerprints and those of their task files."""
    return [
        [task.name, task.fingerprint, "" if task.spec is None else task.spec.fingerprint]
        for task in (*data.dev, *data.test)
    ]


def short_hash(told: Any) -> str:
    """8 hex digits of anything that JSON can write."""
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=4).hexdigest()


def free_memory() -> None:
    """Gives back what the last run held, as far as nobody refers to it. cuBLAS keeps a workspace for every stream on
    which a graph was recorded, which would count as memory of the next run."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
