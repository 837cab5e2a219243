"""Weights from a Hugging Face directory into the homes of a `Model`, file by file.

Each tensor is copied from the mapped file directly to its home. Names in the files are those of the module, or the same
without (or with) the prefix of its decoder, as GPT-2 and OPT are published. A checkpoint whose names match in neither
way (Transformers merges the experts of some models while loading) goes through Transformers' own loader and is copied
tensor by tensor; each tensor is freed after its copy.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.disk.weight_files import Stored, is_pickled, open_shard, stored_tensors
from keyhole.errors import UserError, listed
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.progress import tell
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor, Layout
from keyhole.model.structure.skeleton import auto_class, saved_buffers
from keyhole.model.weights.gguf_config import check_gguf_config
from keyhole.model.weights.twice import check_ties, names_of, untied
from keyhole.model.weights.unused import find_unused, unused_line

Target = FlatTensor | torch.Tensor


def fill_from(model: Model, directory: Path, dtype: torch.dtype, fresh_head: bool = False) -> list[FlatTensor]:
    """Fills every parameter and saved buffer of the model from a directory. fresh_head: tensors of a classifier's head
    may be missing in the files, or be there for another number of labels; they are returned, unfilled."""
    stored = stored_tensors(directory)
    check_gguf_config(model.config, directory)
    may_lack = _head_names(model.module) if fresh_head else frozenset()
    names = match_names(model.module, model.layout, stored, may_lack)
    if names is None:
        refuse_unmatched(directory, stored, model.module, model.layout)
        return _fill_by_transformers(model, directory, dtype, may_lack)
    check_shapes(model.layout, stored, names, directory)
    _check_numbers(model.module, stored, names, directory)
    check_ties(model.module, model.layout, stored, directory)
    _say(model, unused_line(find_unused(model.module, stored, names, directory)))
    targets: dict[str, Target] = {t.name: t for t in model.layout.tensors} | saved_buffers(model.module)
    wider: Counter[str] = Counter()
    done, total = 0, sum(tensor.shape.numel() for tensor in model.layout.tensors) * dtype.itemsize
    for file in sorted({stored[name].file for name in names.values()}):
        shard = open_shard(directory / file)
        for name, in_file in names.items():
            target, source = targets[name], stored[in_file]
            if isinstance(target, FlatTensor) and model.homes.is_foreign(target):
                continue
            if source.file == file:
                if isinstance(target, FlatTensor) and model.homes.takes_codes(target, source.grid):
                    model.homes.put_codes(target, *source.codes(directory, in_file), source.levels(directory))
                else:
                    found = source.read(directory, in_file) if source.form else shard.get_tensor(in_file)
                    _fill(model, target, found)
                    wider.update([_name(found.dtype)] if _is_wider(target, found, dtype) else ())
                done += target.shape.numel() * dtype.itemsize
                tell("reading weights", done, max(done, total), "bytes")
    said = ", ".join(f"{count:,} in {name}" for name, count in wider.items())
    _say(model, [f"weights: tensors of the files are rounded to {_name(dtype)}: {said}"] if wider else [])
    return [tensor for tensor in model.layout.tensors if tensor.name not in names]


def _is_wider(target: Target, found: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight has more bits in the files than it is computed with."""
    return isinstance(target, FlatTensor) and found.dtype.itemsize > max(dtype.itemsize, target.param.dtype.itemsize)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _say(model: Model, lines: list[str]) -> None:
    """Adds lines to the model's description, each once."""
    if model.placed is not None:
        model.placed.reasons += [line for line in lines if line not in model.placed.reasons]


def _check_numbers(module: nn.Module, stored: Mapping[str, Stored], names: dict[str, str], directory: Path) -> None:
    """UserError if a file has integers for a weight: codes of a format that is not supported."""
    whole = {name for name, buffer in saved_buffers(module).items() if not buffer.is_floating_point()}
    for in_file in (names[name] for name in names if name not in whole):
        found = stored[in_file]
        if not found.is_number:
            raise UserError(
                f"model: {directory / found.file} holds {in_file} as whole numbers ({found.dtype}): codes of quantised "
                "weights, in a format that is not read here; dequantize the model first, or fetch it in 16 bits"
            )


def _head_names(module: nn.Module) -> frozenset[str]:
    """Parameters outside of the pretrained part, and its pooling layer, which some encoders are published without."""
    prefix = f"{module.base_model_prefix}."
    names = [name for name, _ in module.named_parameters()]
    return frozenset(name for name in names if not name.startswith(prefix) or f"{prefix}pooler." in name)


def _fill(model: Model, target: Target, tensor: torch.Tensor) -> None:
    if isinstance(target, FlatTensor):
        flat = tensor.reshape(-1)
        model.homes.fill(
            target,
            lambda home: home.copy_(tensor),
            lambda piece, begin: piece.copy_(flat[begin : begin + piece.numel()]),
        )
    else:
        target.copy_(tensor)


def match_names(
    module: nn.Module, layout: Layout, stored: Mapping[str, Stored], may_lack: frozenset[str] = frozenset()
) -> dict[str, str] | None:
    """Name in the module -> name in the files; None if a parameter has no match, and Transformers must load the model.
    may_lack: parameters that are left out if they have no match, or if theirs is for another number of labels."""
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    shapes = {tensor.name: tuple(tensor.shape) for tensor in layout.tensors if tensor.name in may_lack}
    names: dict[str, str] = {}
    for own, known in names_of(module, layout):
        found = next((name for name in known if name in stored), None)
        if found is not None and own in shapes and _other_labels(module, shapes[own], stored[found].shape):
            found = None
        if found is None and own not in may_lack:
            return None
        names |= {} if found is None else {own: found}
    for name in saved_buffers(module):
        found = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in stored), None)
        names |= {} if found is None else {name: found}
    return names


def _other_labels(module: Any, own: tuple[int, ...], found: tuple[int, ...]) -> bool:
    """Whether two shapes of a head's last layer differ in the number of labels alone."""
    return own[:1] == (module.config.num_labels,) and found[:1] != own[:1] and found[1:] == own[1:]


def refuse_unmatched(directory: Path, stored: Mapping[str, Stored], module: nn.Module, layout: Layout) -> None:
    """UserError if quantised weights have names that only Transformers could match: it would need the packages of their
    format, and would not unpack them."""
    if kinds := sorted({one.form for one in stored.values() if one.form}):
        missing = [own for own, known in names_of(module, layout) if not any(name in stored for name in known)]
        raise UserError(
            f"model: {directory} is published as {', '.join(kinds)}, and has no tensor for {listed(missing, 3)}: its "
            "config.json says another model, or it is published under other names than those of the model (experts one "
            "by one, where the model has stacks of them), which is not read; dequantize it first, or fetch it in 16 "
            "bits and pack it here (wire=int4)"
        )


def check_shapes(layout: Layout, stored: Mapping[str, Stored], names: dict[str, str], directory: Path) -> None:
    """UserError if a tensor in the files has another shape than the config says."""
    for tensor in (t for t in layout.tensors if t.name in names):
        found = stored[names[tensor.name]]
        if found.shape != tuple(tensor.shape):
            file, expected = directory / found.file, tuple(tensor.shape)
            raise UserError(f"model: {file} holds {tensor.name} with shape {found.shape}; config.json says {expected}")


def check_weights(module: nn.Module, layout: Layout, directory: Path, fresh_head: bool = False) -> list[str]:
    """Checks what a load would find, from the headers alone: raises UserError, or returns lines that describe it.
    fresh_head: as in `fill_from`."""
    stored = stored_tensors(directory)
    check_gguf_config(module.config, directory)
    names = match_names(module, layout, stored, _head_names(module) if fresh_head else frozenset())
    files = len({one.file for one in stored.values()})
    count = f"{len(stored)} tensors in {files} {'file' if files == 1 else 'files'}"
    if names is None:
        refuse_unmatched(directory, stored, module, layout)
        return [f"weights: {count}, whose names Transformers will have to match; not checked further"]
    check_shapes(layout, stored, names, directory)
    _check_numbers(module, stored, names, directory)
    check_ties(module, layout, stored, directory)
    left = unused_line(find_unused(module, stored, names, directory))
    drawn = [t.name for t in layout.tensors if t.name not in names]
    rest = f"complete but for {', '.join(drawn)}, drawn by the seed," if drawn else "complete"
    return [f"weights: {count}, {rest} and of the shapes that the config says", *left]


def _fill_by_transformers(
    model: Model, directory: Path, dtype: torch.dtype, may_lack: frozenset[str]
) -> list[FlatTensor]:
    how = {"dtype": dtype, "use_safetensors": not is_pickled(directory), "weights_only": True, "local_files_only": True}
    try:
        how |= {"config": model.config} if model.classifies else {}
        other, info = auto_class(model.config).from_pretrained(directory, output_loading_info=True, **how)
    except Exception as error:  # the files are damaged in a way that only the family's own code detects
        if out_of_memory(error) is not None:
            raise
        why = " ".join(str(error).split())
        raise UserError(f"model: Transformers cannot load {directory}: {why} ({type(error).__name__})") from error
    fresh = may_lack & set(info["missing_keys"])
    if missing := sorted(set(info["missing_keys"]) - fresh):
        raise UserError(f"model: {directory} lacks {missing[0]} ({len(missing)} tensors); is it the right checkpoint?")
    _say(model, unused_line(sorted(info["unexpected_keys"])))
    theirs = dict(other.named_parameters(remove_duplicate=False))
    for own, names in names_of(model.module, model.layout):
        for name in (name for name in names if name in theirs):
            if theirs[name] is not theirs[own] and not torch.equal(theirs[name], theirs[own]):
                raise untied(directory, own, name)
    for tensor in (t for t in model.layout.tensors if t.name not in fresh):
        source = theirs.pop(tensor.name)
        _fill(model, tensor, source.data)
        source.data = source.data.new_empty(0)
    buffers = dict(other.named_buffers())
    for name, buffer in saved_buffers(model.module).items():
        buffer.copy_(buffers[name])
    return [tensor for tensor in model.layout.tensors if tensor.name in fresh]
