"""Weights into the homes of a `Model`: from a Hugging Face directory, file by file, or drawn from a seed.

Each tensor is copied from the mapped file directly to its home. A checkpoint whose names do not match those of the
module (Transformers merges the experts of some models while loading) goes through Transformers' own loader and is
copied tensor by tensor; each tensor is freed after its copy.

Seeded random weights are for benchmarks and tests, if only a config exists. Vectors (norms, biases) keep the values of
the HF model's own initialisation. Matrices are drawn from N(0, initializer_range^2). On a GPU a chunk is drawn there
and copied home, at the speed of the link; on a CPU drawing costs about 10 ns per element.
"""

from collections import Counter
from pathlib import Path

import torch

from keyhole.disk.weight_files import is_pickled, open_shard
from keyhole.errors import UserError, warn
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.progress import tell
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor
from keyhole.model.structure.skeleton import auto_class, saved_buffers
from keyhole.model.weights.fit import find_fit, names_of, untied, unused_line

CHUNK = 1 << 22  # elements drawn at a time: 16 MiB, so that a budget of GPU memory has room for them
Target = FlatTensor | torch.Tensor


def fill_from(model: Model, directory: Path, dtype: torch.dtype, fresh_head: bool = False) -> list[FlatTensor]:
    """Fills every parameter and saved buffer of the model from a directory. fresh_head: tensors of a classifier's head
    may be missing in the files, or be there for another number of labels; they are returned, unfilled."""
    fit = find_fit(model.module, model.layout, directory, fresh_head)
    if fit.names is None:
        return _fill_by_transformers(model, directory, dtype, fit.may_lack)
    _say(model, fit.lines)
    stored, names = fit.stored, fit.names
    targets: dict[str, Target] = {t.name: t for t in model.layout.tensors} | saved_buffers(model.module)
    wider: Counter[str] = Counter()
    done, total = 0, sum(tensor.shape.numel() for tensor in model.layout.tensors) * dtype.itemsize
    for file in sorted({stored[name].file for name in names.values()}):
        shard = open_shard(directory / file)
        for name, in_file in names.items():
            target, source = targets[name], stored[in_file]
            weight = target if isinstance(target, FlatTensor) else None
            if source.file != file or (weight is not None and model.homes.is_foreign(weight)):
                continue
            if weight is not None and model.homes.takes_codes(weight, source.grid):
                has_levels = source.of is not None and "quant_map" in source.of.parts  # the file's own table of numbers
                levels = source.of["quant_map"] if source.of is not None and has_levels else None
                model.homes.put_codes(weight, *source.codes(directory, in_file), levels)
            else:
                found = source.read(directory, in_file) if source.form else shard.get_tensor(in_file)
                _fill(model, target, found)
                if weight is not None and found.dtype.itemsize > max(dtype.itemsize, weight.param.dtype.itemsize):
                    wider[_name(found.dtype)] += 1
            done += target.shape.numel() * dtype.itemsize
            tell("reading weights", done, max(done, total), "bytes")
    said = ", ".join(f"{count:,} in {name}" for name, count in wider.items())
    _say(model, [f"weights: tensors of the files are rounded to {_name(dtype)}: {said}"] if wider else [])
    return [tensor for tensor in model.layout.tensors if tensor.name not in names]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _say(model: Model, lines: list[str]) -> None:
    """Adds lines to the model's description, each once; of warnings, who loads it by a program hears too."""
    new = [line for line in lines if line not in model.describe()]
    model.describe().extend(new)
    for line in (line.removeprefix("warning: ") for line in new if line.startswith("warning: ")):
        warn(line)


def _fill(model: Model, target: Target, tensor: torch.Tensor) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(tensor)
        return
    flat = tensor.reshape(-1)
    model.homes.fill(
        target,
        lambda home: home.copy_(tensor),
        lambda piece, begin: piece.copy_(flat[begin : begin + piece.numel()]),
    )


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


def fill_random(model: Model, std: float, seed: int, only: list[FlatTensor] | None = None) -> None:
    """Fills a Model (or refills it: vectors then stay); its values depend only on the seed and the type of device.
    only: fills these tensors, with values that depend on the seed alone."""
    device = model.device if only is None else torch.device("cpu")
    tensors = model.layout.tensors if only is None else only
    generator = torch.Generator(device).manual_seed(seed)
    for tensor in tensors:

        def draw(target: torch.Tensor, begin: int = 0, tensor: FlatTensor = tensor) -> None:
            if len(tensor.shape) < 2:
                target.copy_(tensor.param.data)
                return
            for part in target.view(-1).split(CHUNK):
                drawn = torch.empty(part.numel(), dtype=torch.float32, device=device).normal_(
                    0.0, std, generator=generator
                )
                part.copy_(drawn.to(part.dtype))  # converted on the device: copy_ would convert on the host, slowly

        model.homes.fill(tensor, draw, draw if len(tensor.shape) > 1 else None)
