"""What is known of a model before its weights are read: its config, its files, and the module without weights.

    name         "demo", a directory, a hub id (downloaded if it is not cached), or a config object, which has no files
    config       Transformers' config, with the head that the caller asked for
    weights      the directory that holds them. Usually the model's own; a light checkpoint (methods/zo/low_rank/) holds
                 factors only, and names the model whose weights they belong to and the format that they were learned in
    module       built on the meta device by Transformers (model/structure/skeleton.py); it gets its memory from the
                 engine, and its generation settings from generation_config.json

Nothing here depends on where weights will live; loading/model.py decides that next.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from keyhole import assets
from keyhole.errors import UserError
from keyhole.methods.zo.low_rank.saved import SavedFactors, find_factors
from keyhole.model.structure.generation_file import read_generation_config
from keyhole.model.structure.skeleton import build, is_classifier, read_config
from keyhole.model.structure.source import find_directory
from keyhole.model.structure.tokenizer import read_tokenizer
from keyhole.model.weights.published import forget_quantization, forms_in


@dataclass(frozen=True)
class StoredWeights:
    """Where the weights are, and in which format they are to be kept. directory: None for a config object; beside:
    factors that were trained beside them; learned_in: the format that these were learned in."""

    directory: Path | None
    wire: str | None
    beside: SavedFactors | None = None
    learned_in: str | None = None

    def notes(self, dtype: torch.dtype) -> list[str]:
        """Lines for the start block."""
        if self.wire == self.learned_in:
            return []
        before = self.learned_in or str(dtype).removeprefix("torch.")
        return [f"wire: {self.wire}, as asked; the factors beside these weights were learned over {before}"]


@dataclass(frozen=True)
class Source:
    """A model by its config and its directory (None: it was given as a config object). name: for messages and cards."""

    config: Any
    directory: Path | None
    name: str | None
    trust_remote_code: bool

    def find_weights(self, wire: str | None, factors: bool) -> StoredWeights:
        """The weights, and the factors beside them if `factors`. The config forgets the quantization of published
        weights: what is saved later has 16 bits."""
        beside = find_factors(self.directory) if factors and self.directory is not None else None
        weights = self.directory if beside is None else beside.weights()
        learned_in = wire if beside is None else beside.wire
        if forms_in(weights):
            forget_quantization(self.config)
        return StoredWeights(weights, learned_in if wire is None else wire, beside, learned_in)

    def build_module(self, dtype: torch.dtype, seed: int, expert_units: bool) -> nn.Module:
        """The module without its weights."""
        with torch.random.fork_rng(devices=[]):  # the model's own code initialises vectors from the global generator
            torch.default_generator.manual_seed(seed)
            module = build(self.config, dtype, self.trust_remote_code, expert_units=expert_units)
        directory = None if is_classifier(self.config) else self.directory
        if directory is not None and (directory / "generation_config.json").exists():
            module.generation_config = read_generation_config(directory)
        return module

    def read_tokenizer(self) -> Any:
        """None for a config object, and for a directory without one."""
        return None if self.directory is None else read_tokenizer(self.directory, self.trust_remote_code)


def find_source(
    model: str | Path | Any, trust_remote_code: bool = False, head: str | None = None, num_labels: int | None = None
) -> Source:
    """Reads the config, and finds or downloads the files."""
    model = assets.locate(os.path.expanduser(model), assets.MODEL) if isinstance(model, str) else model
    config = read_config(model, trust_remote_code, head, num_labels)
    directory = find_directory(model) if isinstance(model, str | Path) else None  # config: a copy, if a head is added
    return Source(config, directory, None if directory is None else str(model), trust_remote_code)


def check_source(model: Any) -> None:
    """Refuses a module: a model is given by name, because its weights are read directly to their homes."""
    if isinstance(model, str | Path | transformers.PretrainedConfig):
        return
    known = getattr(getattr(model, "config", None), "_name_or_path", "") if isinstance(model, nn.Module) else ""
    raise UserError(
        f"keyhole.load: found a {type(model).__name__}, expected a directory, a hub id or a config; write "
        f'keyhole.load("{known or "path-or-hub-id"}")'
        + (", or save it first: model.save_pretrained(path)" if isinstance(model, nn.Module) else "")
    )
