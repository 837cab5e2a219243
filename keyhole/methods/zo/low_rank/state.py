"""Factors in checkpoints and in the replay of a journal.

A checkpoint holds the weights as they are at home, after the last fold, and in the method's tensors what was learned
since: `factors` (all A of the period, and the vectors), and for kept periods `kept`, their A one below the other, and
the sums that earlier periods were folded into (kept.py). V is drawn again (with zo.guide it cannot be, and is saved:
`directions`, `kept_v`). So a run resumes in the middle of a period, to the bit, and a checkpoint takes 4 n bytes more
(OPT-13B, rank 2: 22 MB). If all factors are kept, blocks never change, and a checkpoint is *light*: it holds no model,
but beside the factors the homes of the other units (spine, table, head), and the run resumes from the original model.
Of these, units whose weights are all frozen are left out: `homes` says which are there (0 or 1 for each; without it all
are).

A journal has the scalars of every step, from which A of any period can be recomputed: an update of A is elementwise,
and its noise is a function of (seed, step, element). A replay is the run without its passes: A is updated step by step,
and what the periods have learned is folded into unit after unit. Many periods share one visit of a unit (AT_ONCE bytes
of A).
"""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.zo.low_rank.factors import Factors, Fold
from keyhole.methods.zo.low_rank.guide import Guide
from keyhole.methods.zo.low_rank.merge import arrive, fold_into
from keyhole.methods.zo.update import Pending, Update
from keyhole.model.structure.layout import Unit

AT_ONCE = 2**30


def to_state(factors: Factors) -> dict[str, Any]:
    """Tensors for a checkpoint; a remaining fold is applied before the weights are saved."""
    state: dict[str, Any] = {"factors": factors.now}
    if factors.found_for == factors.period:
        state["directions"] = factors.v
    if not factors.folds:
        others = list(_others(factors))
        saved = [number in factors.restored or _may_differ(factors, unit) for number, (unit, _) in enumerate(others)]
        there = [other for other, is_there in zip(others, saved, strict=True) if is_there]
        state |= {"light": True} | {f"home.{unit.index}": home for unit, home in there}
        state |= {} if all(saved) else {"homes": torch.tensor(saved, dtype=torch.int64)}
    state |= dict(factors.kept.to_state())
    return state


def _others(factors: Factors) -> Iterator[tuple[Unit, torch.Tensor]]:
    """The units outside of blocks, and their homes."""
    for unit in factors.model.layout.units:
        if unit.index not in factors.units:
            yield unit, factors.model.engine.homes[unit.index]


def _may_differ(factors: Factors, unit: Unit) -> bool:
    """Whether the unit may differ from the original model: something in it is trained, or a head that was drawn."""
    drawn = {id(tensor) for tensor in factors.model.drawn_head}
    return any(tensor.param.requires_grad or id(tensor) in drawn for tensor in unit.tensors)


def _take_homes(factors: Factors, state: Mapping[str, Any]) -> None:
    """Copies the saved homes, in the order of units: their numbers depend on how many units a memory budget cuts the
    blocks between them into. ValueError if they are of other units."""
    saved = sorted((name for name in state if name.startswith("home.")), key=lambda name: int(name[len("home.") :]))
    others = [home for _, home in _others(factors)]
    there = state["homes"].tolist() if "homes" in state else [1] * len(others)
    if len(there) != len(others):
        raise ValueError(f"saved for {len(there)} units outside of blocks, and this model has {len(others)}")
    factors.restored = {number for number, is_there in enumerate(there) if is_there}
    changing = [others[number] for number in sorted(factors.restored)]
    found = [state[name] for name in saved]
    if [home.shape for home in found] != [home.shape for home in changing]:
        raise ValueError(f"{len(saved)} saved units for {len(changing)} of this model, or of other sizes")
    for home, kept in zip(changing, found, strict=True):
        home.copy_(kept)
    factors.model.engine.invalidate()


def from_state(factors: Factors, state: Mapping[str, Any], steps: int, homes: bool = True) -> None:
    """Loads the tensors of a checkpoint after `steps` steps. homes: for a light checkpoint, also the weights at home
    that it contains."""
    if "factors" not in state or state["factors"].shape != factors.now.shape:
        raise UserError("zo.rank: the checkpoint has no factors of this rank; zo.rank must be as it was")
    factors.now.copy_(state["factors"])
    if not factors.folds and homes:
        _take_homes(factors, state)
    factors.fold, factors.steps = None, steps
    factors.kept = factors.kept.emptied()
    factors.kept.take_sums(state, factors.now.device)
    periods = state["kept"] if "kept" in state else ()
    if len(periods) > steps // factors.refresh:
        raise ValueError(f"{len(periods)} kept periods after {steps} steps, of {factors.refresh} steps each")
    for period, a in enumerate(periods, steps // factors.refresh - len(periods)):
        v = state["kept_v"][period - steps // factors.refresh] if "kept_v" in state else factors.draw_v(period)
        factors.kept.add(a.to(factors.now), v.to(factors.v))
    factors.found_for = None
    if "directions" in state:
        factors.take_v(state["directions"], factors.period)
    else:
        factors.v.copy_(factors.draw_v(factors.period))


def check_guide(factors: Factors, state: Mapping[str, Any], guided: bool) -> None:
    """Refuses a state whose V were found from data, if this run draws V, and the reverse: within a period the factors
    would be multiplied by another V, and V of kept periods would be lost."""
    found = "directions" in state or "kept_v" in state
    drawn = not found and ("kept" in state or int(state["step_count"]) % factors.refresh > 0)
    if (found and not guided) or (drawn and guided):
        was = "found from data" if found else "random"
        raise UserError(f"zo.guide: the directions of the state are {was}; zo.guide must be as it was")


def saved(factors: Factors, state: Mapping[str, Any]) -> Factors | None:
    """The factors of a checkpoint, beside those of the run; None if its weights contain everything."""
    steps = int(state["step_count"])
    if steps % factors.refresh == 0 and "kept" not in state and "folds" not in state:
        return None
    twin = copy.copy(factors)
    twin.now, twin.v = torch.empty_like(factors.now), torch.empty_like(factors.v)
    from_state(twin, state, steps, homes=False)
    return twin


def replay(
    factors: Factors, guide: Guide | None, update: Update, updates: list[tuple[Pending, float]]
) -> Iterator[Unit]:
    """Applies known updates, each with its weight decay; yields every unit after its last update. guide: reads V from
    its files; None: V is drawn."""
    group: list[tuple[Pending, float]] = []
    folds: list[Fold] = []
    for number, one in enumerate(updates, 1):
        group.append(one)
        if guide is not None and guide.is_due:
            factors.take_v(guide.read(factors.period), factors.period)
        factors.update(one[0])
        if (fold := factors.fold) is not None and fold.left:
            folds.append(fold)
            factors.fold = None
        last = number == len(updates)
        if last or len(folds) * max(1, 4 * factors.parts.a_numel) >= AT_ONCE:
            visited = update.replay(group, partial(_fold_all, factors, folds) if folds else None)
            if last:
                yield from visited
            else:
                list(visited)
            group, folds = [], []


def _fold_all(factors: Factors, folds: list[Fold], unit: Unit, w: torch.Tensor) -> None:
    for fold in folds:
        fold_into(factors, unit, w, fold)
    arrive(factors, unit, w, awaited=True)
