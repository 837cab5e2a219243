"""The files of a model that is saved: which tensors they hold, under which names, cut into which weight files.

What a save writes is planned here without reading a weight, for one process and for several ranks (save.py), and for
snapshots in the background (keyhole/checkpoint/writer.py).
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from keyhole.disk.tensors import SHARD_BYTES, Files, Spec, lay_out
from keyhole.model.model import Model
from keyhole.model.structure.config_files import make_writable
from keyhole.model.structure.skeleton import saved_buffers
from keyhole.model.weights.format import PACKED


def first_bad_tensor(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; None if all are finite. Allocates no memory."""
    for name, tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            low, high = torch.aminmax(tensor)  # either is NaN if any element is
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None


def names_on_disk(model: Model) -> dict[str, str] | None:
    """Name in the module -> name in the files; None if the two differ in more than names."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in weight_specs(model)}
    owners = {id(tensor): name for name, tensor in tensors.items()}
    try:
        stored = revert_weight_conversion(model.module, dict(tensors))
    except Exception:  # the conversion needs more than shapes: renaming is not enough
        return None
    names = {owners.get(id(tensor), ""): name for name, tensor in stored.items()}
    return names if names.keys() == tensors.keys() else None


def weight_specs(model: Model) -> list[Spec]:
    """The tensors in a model directory: parameters (a tied one once), and the saved buffers."""
    left_out = set(model.module._keys_to_ignore_on_save or ())

    def stored(dtype: torch.dtype) -> torch.dtype:
        return model.formats.saved if dtype == PACKED else dtype

    homes = model.engine.homes
    units = {t.name: unit for unit in reversed(model.layout.units) for t in unit.tensors}
    specs = [Spec(t.name, stored(homes[units[t.name].index].dtype), tuple(t.shape)) for t in model.layout.tensors]
    specs += [Spec(name, b.dtype, tuple(b.shape)) for name, b in saved_buffers(model.module).items()]
    return [spec for spec in specs if spec.name not in left_out]


def plan_files(model: Model, names: dict[str, str]) -> Files:
    """How the weights are split into files; names: in the module -> in the files."""
    specs = [replace(spec, name=names[spec.name]) for spec in weight_specs(model)]
    return lay_out(specs, limit_bytes=SHARD_BYTES)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """A context in which Hugging Face shows no progress bars."""
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


@no_progress_bars()
def small_files(model: Model) -> dict[str, bytes]:
    """Everything but the weights, as Transformers writes it: relative name -> content."""
    make_writable(getattr(model.module, "generation_config", None))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        model.module.save_pretrained(path, state_dict={"nothing": torch.zeros(1)})
        (path / "model.safetensors").unlink()
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(path)
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def write_contents(path: Path, contents: dict[str, bytes]) -> None:
    """Writes small files into a directory: relative name -> content."""
    for name, content in contents.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
