"""The weights of a sharded model on disk: every rank writes its own byte ranges of the same Hugging Face files.

The leader creates the files at their final size (saved_files.py), with everything except the weights; then each rank
writes its own elements at their places and flushes them; the leader writes what all ranks have (table, spine, buffers).
No rank needs more memory for the model than before. All ranks must see one file system.

Tensors of a method's state that are split over ranks (disk/tensors.py) are written in the same way, into one file.

The leader starts it (`model.call_others`); the other ranks follow (training/follow.py) by calling the same functions.
If a rank cannot write, it reports that and the leader raises: the checkpoint gets no name.
"""

from pathlib import Path
from typing import Any

import torch

from keyhole.disk.tensors import Ranges, Spec, create, fill, lay_out
from keyhole.errors import UserError
from keyhole.model.structure.skeleton import saved_buffers
from keyhole.model.weights.finite import first_bad_tensor
from keyhole.model.weights.saved_files import names_on_disk, plan_files, write_small_files


def check_names(model: Any) -> None:
    """Refuses, before training, a model whose files store other tensors than it computes with."""
    if model.sharded and names_on_disk(model) is None:
        raise UserError(
            f"model: {type(model.module).__name__} is stored in other tensors than it computes with, which ranks "
            "cannot write by parts; start it without torchrun, or with method=zo"
        )


def bad_tensor(model: Any) -> str | None:
    """The name of a tensor with NaN or infinity on any rank; None if all are finite."""
    if not model.sharded:
        return first_bad_tensor(model.named_tensors(merged=False))
    if model.ranks.is_leader:
        model.call_others("check")
    own = first_bad_tensor((name, part) for name, _, part in model.own_tensors())
    return next((name for name in model.ranks.objects(own) if name is not None), None)


def write_parts(model: Any, path: Path | None) -> None:
    """Writes a sharded model into a directory. path: given on the leader; the other ranks receive it."""
    leads, ranks = model.ranks.is_leader, model.ranks
    if leads:
        model.call_others("write")
    path = Path(ranks.from_leader(lambda: _absolute(path)))
    names = names_on_disk(model)
    assert names is not None  # a sharded model without is refused above
    files = plan_files(model, names)

    def make() -> None:
        write_small_files(model, path)
        create(files, path)
        if model.addon is not None:
            model.addon.write_files(path)

    def write() -> None:
        own = list(model.own_tensors())
        own += [(name, 0, buffer) for name, buffer in saved_buffers(model.module).items()] if leads else []
        for name, begin, part in own:
            if name in names:
                fill(path, files.places[names[name]], part, begin, flush=True)

    _together(ranks, make if leads else lambda: None)
    _together(ranks, write)


def write_state_parts(model: Any, path: Path | None, tensors: dict[str, torch.Tensor | Ranges]) -> None:
    """Writes a method's tensors into a file: each rank its ranges, the leader all other tensors. path: given on the
    leader; the other ranks receive it."""
    leads, ranks = model.ranks.is_leader, model.ranks
    if leads:
        model.call_others("state")
    path = Path(ranks.from_leader(lambda: _absolute(path)))
    files = lay_out(
        [Spec(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in sorted(tensors)], path.stem
    )

    def write() -> None:
        for name, tensor in tensors.items():
            own = tensor.own if isinstance(tensor, Ranges) else [(0, tensor)] if leads else []
            for begin, part in own:
                fill(path.parent, files.places[name], part, begin, flush=True)

    _together(ranks, (lambda: create(files, path.parent)) if leads else lambda: None)
    _together(ranks, write)


def _together(ranks: Any, act: Any) -> None:
    """Every rank calls act(); the leader raises if one failed."""
    fault = None
    try:
        act()
    except OSError as error:
        fault = str(error)
    faults = {rank: said for rank, said in enumerate(ranks.objects(fault)) if said is not None}
    if faults and ranks.is_leader:
        rank, said = next(iter(faults.items()))
        raise OSError(f"rank {rank}: {said}")


def _absolute(path: Path | None) -> str:
    assert path is not None
    return str(path.absolute())
