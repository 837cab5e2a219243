"""A model as an ordinary Hugging Face directory, written atomically, by one process or by several ranks.

`save_model` implements Model.save_pretrained: all files are written into a temporary directory, flushed, and moved
into place. A target that does not exist is created by one rename. If the target exists (it may be a mount point, and
hold run/, checkpoints and the user's files), the temporary directory is inside it, and files are moved one by one: the
old config.json and index are removed first, weights of the old model that the new one does not replace later, and the
new index and config.json are moved last. So a crash in between leaves a directory that does not load rather than one
that mixes two models. Only weights that an older save wrote are deleted (disk/weight_files.py `stored_weights`), and
adapters in adapter/ that belong to them; everything else stays.

Weights are written tensor by tensor from their homes, unpacked or merged with an addon (LoRA) one at a time. If
Transformers stores other tensors than it computes with (it merges the experts of some mixtures when loading), its own
writer is used, which needs all of them in memory.

Of a sharded model the leader creates the files at their final size, with everything except the weights; then each rank
writes its own elements at their places and flushes them; the leader writes what all ranks have (table, common,
buffers). Tensors of a method's state that are split over ranks (disk/tensors.py) are written in the same way, into one
file. No rank needs more memory for the model than before; all must see one file system. The leader starts it
(`model.call_others`), and the others follow (training/loop.py) by calling the same functions. If a rank cannot write,
the leader raises: the checkpoint gets no name.

`publish` makes the last checkpoint of a finished run the model of the output directory. Weight files are linked, not
copied: that takes no time, and no disk space.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.disk.files import flush, flush_all, staged
from keyhole.disk.tensors import SHARD_BYTES, Files, Ranges, Spec, create, fill, lay_out, one_file
from keyhole.disk.weight_files import INDEX, stored_weights
from keyhole.errors import NonFinite, UserError
from keyhole.machine.settings import progress_bars
from keyhole.model.model import Model
from keyhole.model.structure.config_files import make_writable, setting
from keyhole.model.structure.skeleton import saved_buffers
from keyhole.model.structure.source import OF_ADAPTER
from keyhole.model.weights.format import PACKED
from keyhole.model.weights.small_files import CONFIG, GENERATION, TEMPLATE, written


def save_model(model: Model, path: Path, merged: bool = True, tokenizer: Any = None) -> list[str]:
    """model is a keyhole Model; its weights are at their homes (methods flush before they save). merged: as in
    Model.named_tensors; tokenizer: None takes the model's. Returns lines about the files beside the weights. NonFinite
    if a weight is NaN or infinity, or if they are of two steps: old files stay."""
    model.methods.check_whole()
    in_the_way = next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), None)
    if in_the_way is not None:
        raise UserError(f"{in_the_way} is a file, so the model is not saved to {path}; choose a directory")
    with _staged_for(path) as temporary:
        try:
            lines = write_files(model, temporary, merged, tokenizer)
        except NonFinite as error:
            raise NonFinite(f"{error}, so the model is not saved to {path}") from error
        flush_all(temporary)
        move_into_place(temporary, path)
    return lines


def _staged_for(path: Path) -> AbstractContextManager[Path]:
    """A temporary directory on the file system of `path`."""
    return staged(path, "model") if path.is_dir() else staged(path.parent, path.name)


def write_files(model: Model, path: Path, merged: bool = True, tokenizer: Any = None) -> list[str]:
    """Writes the files themselves: weights, and those beside them (small_files.py), about which it returns lines.
    NonFinite: some are written."""
    names, (contents, lines) = names_on_disk(model), small_files(model, tokenizer)
    tensors = chain(finite(model.named_tensors(merged)), saved_buffers(model.module).items())
    if names is None:
        make_writable(setting(model.module, "generation_config"))
        with torch.no_grad(), progress_bars().held(False):
            model.module.save_pretrained(path, state_dict=dict(tensors), max_shard_size=SHARD_BYTES)
        for file in {file.name for file in path.iterdir()} - stored_weights(path) - {INDEX}:
            (path / file).unlink()
    else:
        files = plan_files(model, names)
        create(files, path)
        for name, tensor in tensors:
            if name in names:
                fill(path, files.places[names[name]], tensor)
    write_contents(path, contents)
    if model.methods.addon is not None:
        model.methods.addon.write_files(path)
    return lines


def add_end_tokens(module: nn.Module, token_ids: Iterable[int]) -> list[int]:
    """Makes generation stop at these tokens too; returns all tokens it stops at."""
    generation = getattr(module, "generation_config", None)
    if generation is None:  # a classifier
        return []
    known = generation.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    known += [i for i in dict.fromkeys(token_ids) if i not in known]
    generation.eos_token_id = known[0] if len(known) == 1 else known or None
    return known


def move_into_place(temporary: Path, path: Path) -> None:
    """One rename if the target does not exist; otherwise one rename per file, those without which it does not load
    last."""
    if not path.exists():
        os.replace(temporary, path)
        flush(path.parent)
        return
    names = {file.relative_to(temporary).as_posix() for file in temporary.rglob("*") if not file.is_dir()}
    adapter = {f"adapter/{name}" for name in OF_ADAPTER if (path / "adapter" / name).is_file()}  # of the model before
    adapter |= {name for name in (GENERATION, TEMPLATE) if (path / name).is_file()}
    stale, last = (stored_weights(path) | adapter) - names, [name for name in (INDEX, CONFIG) if name in names]
    for name in {INDEX, *last}:
        (path / name).unlink(missing_ok=True)
    for name in sorted(names - set(last)):
        folder = (path / name).parent  # adapter/ and the like may have files of the user
        if folder != path and folder.is_symlink():
            folder.unlink()
        folder.mkdir(exist_ok=True)
        os.replace(temporary / name, path / name)
    for name in stale:
        (path / name).unlink()
    if adapter & stale:
        with suppress(OSError):  # files of the user are in it
            (path / "adapter").rmdir()
    for name in last:
        os.replace(temporary / name, path / name)
    for folder in {(path / name).parent for name in names}:
        flush(folder)


def publish(checkpoint: Path, path: Path, names: Iterable[str]) -> None:
    """Makes the model in `checkpoint` the model of the directory `path`. names: its files; FileNotFoundError if one is
    missing, because somebody is deleting it."""
    with _staged_for(path) as temporary:
        for name in names:
            (temporary / name).parent.mkdir(exist_ok=True)
            (_link_or_copy if name.endswith(".safetensors") else shutil.copyfile)(checkpoint / name, temporary / name)
        flush_all(temporary)
        move_into_place(temporary, path)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def check_names(model: Model) -> None:
    """Refuses, before training, a model whose files store other tensors than it computes with."""
    if model.sharded and names_on_disk(model) is None:
        raise UserError(
            f"model: {type(model.module).__name__} is stored in other tensors than it computes with, which ranks "
            "cannot write by parts; start it without torchrun, or with method=zo"
        )


def write_parts(model: Model, path: Path | None) -> None:
    """Writes a sharded model into a directory. path: given on the leader; the other ranks receive it."""
    names = names_on_disk(model)
    assert names is not None  # a sharded model without is refused above

    def make(path: Path) -> None:
        write_contents(path, small_files(model)[0])
        if model.methods.addon is not None:
            model.methods.addon.write_files(path)

    buffers = saved_buffers(model.module).items() if model.ranks.is_leader else ()
    own = chain(model.own_tensors(), ((name, 0, buffer) for name, buffer in buffers))
    named = ((names[name], begin, part) for name, begin, part in own if name in names)
    _write_together(model, "write", path, plan_files(model, names), named, make)


def write_state_parts(model: Model, path: Path | None, tensors: dict[str, torch.Tensor | Ranges], name: str) -> None:
    """Writes a method's tensors into the file `name` of a directory: each rank its ranges, the leader all other
    tensors. path: as above."""
    leads = model.ranks.is_leader
    own = (
        (key, begin, part)
        for key, tensor in tensors.items()
        for begin, part in (tensor.own if isinstance(tensor, Ranges) else [(0, tensor)] if leads else [])
    )
    _write_together(model, "state", path, one_file(tensors, name), own)


def _write_together(
    model: Model,
    command: str,
    directory: Path | None,
    files: Files,
    own: Iterable[tuple[str, int, torch.Tensor]],
    make: Callable[[Path], None] = lambda path: None,
) -> None:
    """The leader calls the others, tells them its directory, and makes the files; then every rank writes its own
    elements at their places. The leader raises if one of them failed, or has numbers that are not finite."""
    ranks, leads = model.ranks, model.ranks.is_leader
    if leads:
        model.call_others(command)
    path = Path(ranks.from_leader(lambda: str(directory and directory.absolute())))

    def prepare() -> None:
        if leads:
            create(files, path)
            make(path)

    def write() -> None:
        for name, begin, part in own:
            if first_bad_tensor([(name, part)]) is not None:
                raise NonFinite(f"{name} holds NaN or infinity")
            fill(path, files.places[name], part, begin, flush=True)

    for act in (prepare, write):
        fault: OSError | NonFinite | None = None
        try:
            act()
        except (OSError, NonFinite) as error:
            fault = error
        found = ranks.objects(fault)
        for rank, one in enumerate(found if leads else ()):
            if one is not None:
                raise type(one)(f"rank {rank}: {one}") from one


# -- which files these are, planned without reading a weight -----------------------------------------------------------


def first_bad_tensor(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; None if all are finite. Allocates no memory."""
    for name, tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            low, high = torch.aminmax(tensor)  # either is NaN if any element is
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None


def finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, one after the other; NonFinite at the first that is not finite."""
    for name, tensor in tensors:
        if first_bad_tensor([(name, tensor)]) is not None:
            raise NonFinite(f"{name} holds NaN or infinity")
        yield name, tensor


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


def small_files(model: Model, tokenizer: Any = None) -> tuple[dict[str, bytes], list[str]]:
    """The files beside the weights, and lines about them (small_files.py). tokenizer: None takes the model's."""
    dtype, known = model.formats.saved if model.formats.packs else model.formats.plain, model.tokenizer
    return written(model.published, model.module, dtype, known if tokenizer is None else tokenizer, known)


def write_contents(path: Path, contents: dict[str, bytes]) -> None:
    """Writes small files into a directory: relative name -> content."""
    for name, content in contents.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
