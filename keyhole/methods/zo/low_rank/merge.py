"""From the factors into the weights: W <- round(W + A V^T / sqrt(r)).

    bring_home   what a period has learned, when it ends: every block crosses the link once more per period. With it
                 the vectors beside the matrices, which a save takes from the factors otherwise
    as_saved     a copy of the matrix with everything that was learned, also within the period, rounded once; the
                 weights at home are not changed
    settle       another method will train the weights: everything is merged into them

The kernel is ops/lowrank/fold.py. Rounding bits are a function of (seed, step, element), so a tile of rows gives those
of the whole matrix. Bytes in 16 bit: 2 read and 2 written per element, once per period.
"""

from collections.abc import Sequence

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.zo.low_rank.factors import Factors, Fold, Rows
from keyhole.methods.zo.low_rank.parts import Matrix, vector_at
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.model.weights.format import PACKED
from keyhole.model.weights.homes import view


def bring_home(factors: Factors, folds: Sequence[Fold] = ()) -> None:
    """Folds finished periods into the homes of all blocks; without any, updates those that a checkpoint waits for."""
    model, watch = factors.model, factors.model.engine.watch
    waits = () if watch is None else [u for u in model.layout.of_kind("block") if watch.waits_for(u.index)]
    units = model.layout.of_kind("block") if folds else waits
    if not units:
        return
    with torch.no_grad(), model.rewriting_shared(), model.sweep("flush", experts=True):
        for unit in units:
            if unit.index not in model.homes.foreign:
                arrive(factors, unit, model.engine.acquire(unit.index), folds)
                model.engine.commit(unit.index)
                model.engine.release(unit.index)


def arrive(factors: Factors, unit: Unit, w: torch.Tensor, folds: Sequence[Fold] = ()) -> None:
    """Folds periods into a unit that is on the device as at home, and updates its vectors."""
    first, last = (0, None) if unit.rows is None else unit.rows
    matrices, vectors = factors.parts.of(unit)
    for fold in folds:
        for matrix in matrices:
            part = view(w, matrix.tensor, unit.start) if last is None else w[: (last - first) * matrix.inputs]
            rows = factors.rows(fold.a, matrix.a), factors.rows(fold.v, matrix.v)
            _add(factors, matrix, part.view(-1, matrix.tensor.shape[1]), rows, fold.step, first)
    if w.dtype != PACKED:
        for vector in vectors:
            view(w, vector.tensor, unit.start).copy_(vector_at(factors.now, vector))


def _add(factors: Factors, matrix: Matrix, w: torch.Tensor, rows: Rows, step: int, first_row: int = 0) -> None:
    """W <- round(W + A V^T), or a tile of its rows."""
    a, v = (x.to(w.device) for x in rows)
    if not matrix.transposed:
        a = a[:, first_row : first_row + w.shape[0]].contiguous()
    left, right = (v, a) if matrix.transposed else (a, v)
    begin, seed = matrix.tensor.start, factors.noise["seed"]
    ops.fold_(w, left, right, offset=begin, first_row=first_row, seed=seed, step=step, rounding=factors.rounding)


def as_saved(factors: Factors, tensor: FlatTensor, home: torch.Tensor, merged: bool = True) -> torch.Tensor:
    """A parameter with everything that was learned, rounded once; `home` itself if nothing is to be added.
    merged=False: matrices as they are at home."""
    for vector in factors.parts.vectors:
        if vector.tensor is tensor:
            return vector_at(factors.now, vector).to(home)
    for index, matrix in enumerate(factors.parts.matrices):
        if matrix.tensor is tensor and merged and (rows := factors.learned(index)) is not None:
            whole = home.to(factors.now.device, copy=True)  # on the CPU a large model would take minutes
            _add(factors, matrix, whole, rows, factors.steps)
            return whole.to(home.device)
    return home


@torch.no_grad()
def settle(factors: Factors) -> None:
    """Merges everything that was learned into the weights at home, also within a period, and ends."""
    model, parts = factors.model, factors.parts
    tensors = [m.tensor for m in parts.matrices] + [v.tensor for v in parts.vectors] if factors.steps else []
    if any(map(model.homes.is_packed, tensors)):
        raise UserError("zo.fold=false: weights that are packed are frozen; save the model and load that")
    with model.rewriting_shared():
        for tensor in tensors:
            if not model.homes.is_foreign(tensor):
                home = model.home(tensor)
                home.copy_(as_saved(factors, tensor, home))
        model.engine.invalidate()
    model.methods.low_rank = None
