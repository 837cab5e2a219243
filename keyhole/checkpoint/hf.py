"""A model as an ordinary Hugging Face directory, written atomically.

`save_model` is what Model.save_pretrained does: all files go into a directory beside the target, are flushed,
and are moved into place. Where the target exists already and holds other things (run/, checkpoints), files
are moved one by one: first the old index is taken away, last the new one comes, so that a crash in between
leaves a directory that does not load rather than one that mixes two models.

`publish` gives a finished run's last checkpoint to the user as the model of the output directory. Weight
files are linked, not copied: no time, and no space on disk.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.checkpoint.files import flush, flush_all, replace_directory, staged
from keyhole.model.skeleton import saved_buffers

SHARD_SIZE = "2GB"  # also the extra host memory a save needs when weights are on a GPU
INDEX = "model.safetensors.index.json"


def save_model(model: Any, path: Path) -> None:
    """model is a keyhole Model; its weights are at their homes (methods flush before they save)."""
    with staged(path) as temporary:
        write_files(model, temporary)
        flush_all(temporary)
        move_into_place(temporary, path)


def write_files(model: Any, path: Path) -> None:
    """The files themselves: weights, config, generation config, tokenizer."""
    tensors = dict(model.named_tensors()) | saved_buffers(model.module)
    make_generation_config_writable(model.module)
    with torch.no_grad():
        model.module.save_pretrained(path, state_dict=tensors, max_shard_size=SHARD_SIZE)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(path)
    if model.addon is not None:
        model.addon.write(path)


def make_generation_config_writable(module: nn.Module) -> None:
    """Transformers refuses to write a temperature beside do_sample=False; some models are published so."""
    generation = getattr(module, "generation_config", None)
    if generation is None:
        return
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


def add_end_tokens(module: nn.Module, token_ids: Iterable[int]) -> list[int]:
    """Makes generation stop at these tokens too; returns all tokens it stops at."""
    generation = module.generation_config
    known = generation.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    known += [i for i in dict.fromkeys(token_ids) if i not in known]
    generation.eos_token_id = known[0] if len(known) == 1 else known or None
    return known


def move_into_place(temporary: Path, path: Path) -> None:
    """One rename where nothing stands yet; otherwise one a file, the index last; stale weights go."""
    if not path.exists():
        replace_directory(temporary, path)
        return
    names = {file.name for file in temporary.iterdir()}
    (path / INDEX).unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: (name == INDEX, name)):
        if (temporary / name).is_dir():  # further chat templates; a directory cannot be renamed over another
            shutil.rmtree(path / name, ignore_errors=True)
        os.replace(temporary / name, path / name)
    for old in path.glob("model*.safetensors"):
        if old.name not in names:
            old.unlink()
    flush(path)


def publish(checkpoint: Path, path: Path, private: set[str]) -> None:
    """Makes the model in `checkpoint` the model of the directory `path`; `private` files stay out."""
    with staged(path) as temporary:
        for file in checkpoint.iterdir():
            if file.name in private:
                continue
            if file.suffix == ".safetensors":
                _link_or_copy(file, temporary / file.name)
            elif file.is_dir():
                shutil.copytree(file, temporary / file.name)
            else:
                shutil.copyfile(file, temporary / file.name)
        flush_all(temporary)
        move_into_place(temporary, path)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
