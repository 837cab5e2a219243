"""Factors in checkpoints, in the replay of a journal, and a checkpoint as a model.

A checkpoint holds the weights as they are at home, after the last fold, and in the method's tensors what was learned
since: `factors` (all A of the period, and the vectors), and for kept periods `kept`, their A one below the other. V is
drawn again (with zo.guide it cannot be, and is saved: `directions`, `kept_v`). So a run resumes in the middle of a
period, to the bit, and a checkpoint takes 4 n bytes more (OPT-13B, rank 2: 22 MB). If all factors are kept, blocks
never change, and a checkpoint is *light*: it holds no model, but beside the factors the homes of other units (spine,
table, head) in which something is trained, and the run resumes from the original model.

A journal has the scalars of every step, from which A of any period can be recomputed: an update of A is elementwise,
and its noise is a function of (seed, step, element). A replay is the run without its passes: A is updated step by step,
and what the periods have learned is folded into unit after unit. Many periods share one visit of a unit (AT_ONCE bytes
of A).

Evaluation, chat and `keyhole.load` know nothing of methods: loading the directory of a checkpoint also loads its
factors, beside the weights as in training (`SavedFactors`); the weights of a light one are read from the original model
of its run. A method that is then made on the model gets everything folded into the weights. A finished run needs none
of this: its output directory holds an ordinary model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from keyhole.disk.json_text import read_json
from keyhole.disk.tensors import MethodState
from keyhole.disk.weights_hash import content_hash
from keyhole.errors import UserError
from keyhole.methods.base import Saved, State
from keyhole.methods.settings import check_values
from keyhole.methods.zo.low_rank.factors import Factors, Fold, Kept
from keyhole.methods.zo.low_rank.guide import Guide
from keyhole.methods.zo.low_rank.layers import FactoredLayers
from keyhole.methods.zo.low_rank.merge import arrive
from keyhole.methods.zo.traits import ZO, ZOConfig
from keyhole.methods.zo.update import Pending, Update
from keyhole.model.model import Model
from keyhole.model.structure.freeze import frozen_as
from keyhole.model.structure.layout import Unit
from keyhole.model.structure.source import find_directory

AT_ONCE = 2**30
STATE, TENSORS = "keyhole_state.json", "optimizer.safetensors"  # as checkpoint/state.py has them


def to_state(factors: Factors) -> State:
    """Tensors for a checkpoint."""
    state: State = {"factors": factors.now}
    if factors.found_for == factors.period:
        state["directions"] = factors.v
    if not factors.folds:
        homes = factors.model.engine.homes
        state |= {"light": True} | {f"home.{unit.index}": homes[unit.index] for unit in _changing(factors)}
    kept = factors.kept
    state |= {"kept": torch.stack(kept.periods)} if kept.periods else {}
    return state | ({"kept_v": torch.stack(kept.vs)} if kept.vs else {})


def _changing(factors: Factors) -> list[Unit]:
    """The units outside of blocks that may differ from the original model: something in them is trained, or a head that
    was drawn."""
    drawn = {id(tensor) for tensor in factors.model.drawn_head}
    others = [unit for unit in factors.model.layout.units if unit.index not in factors.units]
    return [unit for unit in others if any(t.param.requires_grad or id(t) in drawn for t in unit.tensors)]


def from_state(factors: Factors, state: Saved, steps: int) -> None:
    """Loads the tensors of a checkpoint after `steps` steps, and the weights at home that a light one contains."""
    if "factors" not in state or state["factors"].shape != factors.now.shape:
        raise UserError("zo.rank: the checkpoint has no factors of this rank; zo.rank must be as it was")
    factors.now.copy_(state["factors"])
    if not factors.folds:
        _take_homes(factors, state)
    device, period = factors.now.device, steps // factors.refresh
    factors.steps, before = steps, factors.kept
    factors.kept = Kept(before.parts, factors.v.dtype, device, before.guided, before.version + 1)
    periods = state["kept"] if "kept" in state else ()
    if len(periods) > period:
        raise ValueError(f"{len(periods)} kept periods after {steps} steps, of {factors.refresh} steps each")
    for number, a in enumerate(periods):
        v = state["kept_v"][number] if "kept_v" in state else factors.draw_v(period - len(periods) + number)
        factors.kept.add(a.to(factors.now), v.to(factors.v))
    factors.v.copy_(state["directions"] if "directions" in state else factors.draw_v(period))
    factors.found_for = period if "directions" in state else None


def _take_homes(factors: Factors, state: Saved) -> None:
    """Copies the saved homes, in the order of units: their numbers depend on how many units a memory budget cuts the
    blocks between them into. ValueError if they are of other units."""
    saved = sorted((name for name in state if name.startswith("home.")), key=lambda name: int(name[len("home.") :]))
    found = [state[name] for name in saved]
    changing = [factors.model.engine.homes[unit.index] for unit in _changing(factors)]
    if [home.shape for home in found] != [home.shape for home in changing]:
        raise ValueError(f"{len(saved)} saved units for {len(changing)} of this model, or of other sizes")
    for home, kept in zip(changing, found, strict=True):
        home.copy_(kept)
    factors.model.engine.invalidate()


def check_guide(factors: Factors, state: Saved, guided: bool) -> None:
    """Refuses a state whose V were found from data, if this run draws V, and the reverse: within a period the factors
    would be multiplied by another V, and V of kept periods would be lost."""
    found = "directions" in state or "kept_v" in state
    drawn = not found and ("kept" in state or int(state["step_count"]) % factors.refresh > 0)
    if (found and not guided) or (drawn and guided):
        was = "found from data" if found else "random"
        raise UserError(f"zo.guide: the directions of the state are {was}; zo.guide must be as it was")


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
            guide.read()
        folds += factors.update(one[0])
        if number == len(updates):
            yield from update.replay(group, partial(arrive, factors, folds=folds) if factors.folds else None)
        elif len(folds) * max(1, 4 * factors.parts.a_numel) >= AT_ONCE:
            list(update.replay(group, partial(arrive, factors, folds=folds)))
            group, folds = [], []


# -- a checkpoint as a model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedFactors:
    """Factors in a directory."""

    directory: Path
    own: ZOConfig  # filled: without settings that are null for the estimator's default
    steps: int
    original: str | None  # the model whose weights they belong to; None: the weights in the directory
    wire: str | None = None  # the format of these weights: factors were trained beside the rounded weights
    freeze: str | list[str] | None = None  # what the run did not train has no factors
    base: str | None = None  # the hash of the original's weights

    @property
    def is_light(self) -> bool:
        """Whether the weights are another model's: those that change are with the factors, a new head too."""
        return self.original is not None

    def weights(self) -> Path:
        """The directory that holds the weights. UserError if the original is not there, or not what it was: the factors
        would be added to other weights."""
        if self.original is None:
            return self.directory
        needs = f"model: {self.directory} holds factors alone, beside the weights of {self.original}"
        try:
            found = find_directory(self.original)
        except UserError as error:
            raise UserError(
                f"{needs}, which cannot be read here ({error}). Call from where that name leads to it, or write one "
                f"model: keyhole replay ORIGINAL {self.directory.parent} NEW --steps {self.steps}"
            ) from error
        if self.base is not None and content_hash(found) != self.base:
            raise UserError(
                f"{needs}, and {found} holds other weights by now (the hashes differ); restore them, or write one "
                f"model from a copy of them: keyhole replay COPY {self.directory.parent} NEW --steps {self.steps}"
            )
        return found

    def add_to(self, model: Model) -> str:
        """Attaches them to the model; returns a line that says so."""
        try:
            with frozen_as(model.module, self.freeze):
                factors = Factors(model, self.own, pairs=1)
                FactoredLayers(model, factors)
                from_state(factors, MethodState({}, self.directory / TENSORS), self.steps)
            model.drawn_head = []  # it came with the factors
        except (KeyError, ValueError, RuntimeError, OSError, StopIteration) as error:
            model.methods.low_rank = None
            raise UserError(f"model: {self.directory / TENSORS} does not fit this model: {error}") from error
        beside = "" if self.original is None else f", beside the weights of {self.original}"
        return f"factors: of rank {self.own.rank} after {self.steps} steps, from {self.directory / TENSORS}{beside}"


def find_factors(directory: Path) -> SavedFactors | None:
    """The factors of a checkpoint; None if it has none."""
    if not (directory / STATE).is_file() or not (directory / TENSORS).is_file():
        return None
    found = read_json(directory / STATE, "model")
    config, method = found.get("config"), found.get("method")
    if not isinstance(config, dict) or not isinstance(method, dict) or config.get(f"{ZO.section}.rank") is None:
        return None
    names = ("estimator", "distribution", "rank", "refresh", "fold")
    own = {name: config[f"{ZO.section}.{name}"] for name in names if f"{ZO.section}.{name}" in config}
    own |= {"seed": method.get("seed"), **{name: config[name] for name in ("rounding",) if name in config}}
    steps, original = method.get("step_count"), config.get("model")
    edited = f"model: {directory / STATE} was edited"
    try:
        check_values(ZOConfig, own, ZO.section)
    except UserError as error:
        raise UserError(f"{edited}: {error}") from error
    if type(steps) is not int or not 0 <= steps < 2**32:
        raise UserError(f"{edited}: {steps!r:.40} cannot be its steps")
    settings = ZOConfig(**own).filled()
    if not method.get("light"):
        return SavedFactors(directory, settings, steps, None, freeze=config.get("freeze"), base=found.get("base"))
    if not isinstance(original, str):
        raise UserError(f"model: {directory} holds no weights, and {STATE} does not say whose factors these are")
    return SavedFactors(
        directory, settings, steps, original, config.get("wire"), config.get("freeze"), found.get("base")
    )
