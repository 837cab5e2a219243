"""Weights from a Hugging Face directory into the homes of a `Model`, file by file.

Each tensor is copied from the mapped file to its home and nowhere else. A checkpoint whose names do not match the
module's one to one (Transformers merges the experts of some models while loading) goes through Transformers' own
loader and is moved over tensor by tensor, each freed as it moves.
"""

import json
from pathlib import Path

import torch

from keyhole.errors import UserError
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor
from keyhole.model.structure.skeleton import saved_buffers


def fill_from(model: Model, directory: Path, dtype: torch.dtype) -> None:
    """Fills every parameter and saved buffer of the model from a directory."""
    files = _weight_files(directory)
    aliases: dict[int, list[str]] = {}
    for name, param in model.module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(name)
    wanted: dict[str, list[tuple[str, FlatTensor | torch.Tensor]]] = {}
    for tensor in model.layout.tensors:
        name = next((n for n in aliases[id(tensor.param)] if n in files), None)
        if name is None:
            _fill_by_transformers(model, directory, dtype)
            return
        wanted.setdefault(files[name], []).append((name, tensor))
    for name, buffer in saved_buffers(model.module).items():
        if name in files:
            wanted.setdefault(files[name], []).append((name, buffer))
    for file, pairs in wanted.items():
        _fill_from_shard(model, directory / file, pairs)


def _fill_from_shard(model: Model, file: Path, pairs: list[tuple[str, FlatTensor | torch.Tensor]]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as shard:
            for name, target in pairs:
                stored = shard.get_tensor(name)
                if stored.shape != target.shape:
                    found, expected = tuple(stored.shape), tuple(target.shape)
                    raise UserError(f"model: {file} holds {name} with shape {found}; config.json says {expected}")
                if isinstance(target, FlatTensor):
                    model.homes.fill(target, lambda home, stored=stored: home.copy_(stored))
                else:
                    target.copy_(stored)
    except (SafetensorError, OSError) as error:
        raise UserError(f"model: {file} cannot be read, it may be damaged or incomplete: {error}") from error


def _weight_files(directory: Path) -> dict[str, str]:
    """Tensor name -> file, from the index or the single file of a checkpoint."""
    from safetensors import SafetensorError, safe_open

    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            missing = sorted({f for f in weight_map.values() if not (directory / f).exists()})
            if missing:
                raise UserError(f"model: {index} names {missing[0]}, which is missing ({len(missing)} files)")
            return weight_map
        if single.exists():
            with safe_open(single, framework="pt") as shard:
                return {name: single.name for name in shard.keys()}
    except (SafetensorError, json.JSONDecodeError, KeyError, OSError) as error:
        file = index if index.exists() else single
        raise UserError(f"model: {file} cannot be read, it may be damaged or incomplete: {error}") from error
    pickles = sorted(p.name for p in directory.glob("*.bin"))
    hint = f"; {pickles[0]} is a pickle, which can run code: convert it to safetensors first" if pickles else ""
    raise UserError(f"model: {directory} has no weights (model.safetensors or its index){hint}")


def _fill_by_transformers(model: Model, directory: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    other, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"model: {directory} lacks {missing[0]} ({len(missing)} tensors); is it the right checkpoint?")
    theirs = dict(other.named_parameters(remove_duplicate=False))
    for tensor in model.layout.tensors:
        source = theirs.pop(tensor.name)
        model.homes.fill(tensor, lambda home, source=source: home.copy_(source.data))
        source.data = source.data.new_empty(0)
    buffers = dict(other.named_buffers())
    for name, buffer in saved_buffers(model.module).items():
        buffer.copy_(buffers[name])
