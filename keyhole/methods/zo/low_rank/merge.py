"""From the factors into the weights: W <- round(W + A V^T / sqrt(r)).

    fold         what a finished period has learned, at the unit's next visit (`arrive`), or at once if the
                 homes are needed: before a save, or because ranks share them (`bring_home`)
    a save       a copy of the matrix with everything that was learned, also within the period, rounded once
                 (`as_saved`); the weights at home are not changed
    the end      another method will train the weights: everything is merged into them (`settle`)

The kernel is ops/lowrank/fold.py. Rounding bits are a function of (seed, step, element), so a fold gives the same bits
whenever it is done, and a tile of rows gives those of the whole matrix. Bytes in 16 bit: 2 read and 2 written per
element, once per period; a fold that is not done yet keeps its A and V (`Fold`).
"""

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.zo.low_rank.factors import Factors, Fold
from keyhole.methods.zo.low_rank.parts import Matrix, vector_at
from keyhole.model.structure.layout import FlatTensor, Unit
from keyhole.model.weights.format import PACKED
from keyhole.model.weights.homes import view


def arrive(factors: Factors, unit: Unit, w: torch.Tensor, awaited: bool) -> bool:
    """Called with a unit that is on the device as at home. Applies the folds that it lacks; True: it must be
    written back. awaited: a checkpoint needs its home, so its vectors are updated too."""
    fold, is_changed = factors.fold, False
    if fold is not None and factors.owes(unit):
        fold_into(factors, unit, w, fold)
        fold.left.discard(unit.index)
        is_changed = True
    if (is_changed or awaited) and w.dtype != PACKED:
        for vector in factors.parts.vectors_of(unit):
            view(w, vector.tensor, unit.start).copy_(vector_at(factors.now, vector))
            is_changed = True
    return is_changed


def fold_into(factors: Factors, unit: Unit, w: torch.Tensor, fold: Fold) -> None:
    """W <- round(W + A V^T), for all matrices of a unit (for a tile, its rows)."""
    for matrix in factors.parts.matrices_of(unit):
        a, v = factors.rows(fold.a, matrix.a), factors.rows(fold.v, matrix.v)
        _add(factors, matrix, _inside(unit, w, matrix), a, v, fold.step, 0 if unit.rows is None else unit.rows[0])


def _add(
    factors: Factors, matrix: Matrix, w: torch.Tensor, a: torch.Tensor, v: torch.Tensor, step: int, first_row: int = 0
) -> None:
    a, v = a.to(w.device), v.to(w.device)
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
    index = next((i for i, m in enumerate(factors.parts.matrices) if m.tensor is tensor), None)
    if index is None or not merged or not factors.merges or not factors.learned(index):
        return home
    a, v = (torch.cat(rows) for rows in zip(*factors.learned(index), strict=True))
    whole = home.to(factors.now.device, copy=True)  # on the CPU a large model would take minutes
    _add(factors, factors.parts.matrices[index], whole, a, v, factors.steps)
    return whole.to(home.device)


def bring_home(factors: Factors) -> None:
    """Applies all remaining folds, and updates the homes of units that a checkpoint waits for."""
    model, watch = factors.model, factors.model.engine.watch
    left = set() if factors.fold is None else factors.fold.left
    wanted = [u for u in model.layout.of_kind("block") if watch is not None and watch.waits_for(u.index)]
    units = [unit for unit in model.layout.of_kind("block") if unit.index in left or unit in wanted]
    if not units:
        return
    with torch.no_grad(), model.rewriting_shared(), model.sweep("flush", experts=True):
        for unit in units:
            if unit.index in model.homes.foreign:
                left.discard(unit.index)
                continue
            arrive(factors, unit, model.engine.acquire(unit.index), awaited=True)
            model.engine.commit(unit.index)
            model.engine.release(unit.index)


@torch.no_grad()
def settle(factors: Factors) -> None:
    """Merges everything that was learned into the weights at home, also within a period, and ends."""
    model = factors.model
    if factors.steps == 0:
        model.methods.low_rank = None
        return
    bring_home(factors)
    index = {id(matrix): i for i, matrix in enumerate(factors.parts.matrices)}
    with model.rewriting_shared(), model.sweep("flush", experts=True):
        for unit in model.layout.of_kind("block"):
            if unit.index in model.homes.foreign:
                continue
            w = model.engine.acquire(unit.index)
            if w.dtype == PACKED:
                raise UserError("zo.fold=false: weights that are packed are frozen; save the model and load that")
            arrive(factors, unit, w, awaited=True)
            for matrix in factors.parts.matrices_of(unit):
                if learned := factors.learned(index[id(matrix)]):
                    a, v = (torch.cat(rows) for rows in zip(*learned, strict=True))
                    first = 0 if unit.rows is None else unit.rows[0]
                    _add(factors, matrix, _inside(unit, w, matrix), a, v, factors.steps, first)
            model.engine.commit(unit.index)
            model.engine.release(unit.index)
    model.methods.low_rank = None


def _inside(unit: Unit, w: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """The matrix in the memory of its unit; for a tile, its rows."""
    if unit.rows is None:
        return view(w, matrix.tensor, unit.start)
    first, last = unit.rows
    return w[: (last - first) * matrix.inputs].view(last - first, matrix.inputs)
