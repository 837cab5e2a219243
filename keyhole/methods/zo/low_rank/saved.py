"""A checkpoint of a low-rank run as a model: for evaluation, chat and `keyhole.load`, which know nothing of methods.

In the middle of a period a checkpoint's weights lack what its factors hold, and a light checkpoint has no weights at
all (state.py). So loading such a directory also loads the factors, beside the weights as in training; the weights of a
light checkpoint are read from the original model of the run. A method that is then created on the model gets
everything folded into the weights.

A finished run needs none of this: its output directory holds an ordinary model.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyhole.disk.json_text import read_json
from keyhole.disk.tensors import MethodState
from keyhole.disk.weights_hash import content_hash
from keyhole.errors import UserError
from keyhole.methods.zo.low_rank.factors import Factors
from keyhole.methods.zo.low_rank.layers import FactoredLayers
from keyhole.methods.zo.low_rank.state import from_state
from keyhole.methods.zo.traits import ZO, ZOConfig
from keyhole.model.model import Model
from keyhole.model.structure.freeze import frozen_as
from keyhole.model.structure.source import find_directory

STATE, TENSORS = "keyhole_state.json", "optimizer.safetensors"  # as checkpoint/state.py has them


@dataclass(frozen=True)
class SavedFactors:
    """Factors in a directory."""

    directory: Path
    own: ZOConfig  # filled: without settings that are null for the estimator's default
    seed: int
    steps: int
    original: str | None  # the model whose weights they belong to; None: the weights in the directory
    wire: str | None = None  # the format of these weights: factors were trained beside the rounded weights
    freeze: str | list[str] | None = None  # what the run did not train has no factors
    base: str | None = None  # the hash of the original's weights; None: a run of an old version

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
                factors = Factors(model, replace(self.own, seed=self.seed, fold_periods=None), pairs=1)
                FactoredLayers(model, factors)
            from_state(factors, MethodState({}, self.directory / TENSORS), self.steps)
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
    return _read(directory, config, method, found.get("base"))


def _read(directory: Path, config: dict[str, Any], method: dict[str, Any], base: Any) -> SavedFactors:
    names = ("estimator", "distribution", "rank", "refresh", "fold")
    own = {name: config[f"{ZO.section}.{name}"] for name in names if f"{ZO.section}.{name}" in config}
    own |= {"rounding": config["rounding"]} if "rounding" in config else {}  # a setting of the run
    light = bool(method.get("light"))
    numbers: list[Any] = [own.get("rank"), own.get("refresh", 1), method.get("seed"), method.get("step_count")]
    rank, refresh, seed, steps = numbers
    whole = all(type(number) is int and 0 <= number < 2**32 for number in numbers)
    if not whole or not 0 < rank <= 256 or refresh < 1:
        found = ", ".join(map(repr, numbers))
        raise UserError(f"model: {directory / STATE} was edited: rank, refresh, seed and steps cannot be ({found})")
    known = {
        "distribution": (None, "gaussian", "rademacher"),
        "rounding": ("stochastic", "nearest"),
        "fold": (True, False),
    }
    for name, values in known.items():
        if name in own and own[name] not in values:
            raise UserError(f"model: {directory / STATE} was edited: zo.{name} cannot be {own[name]!r:.40}")
    if light and not isinstance(config.get("model"), str):
        raise UserError(f"model: {directory} holds no weights, and {STATE} does not say whose factors these are")
    try:
        original, wire = (config["model"], config.get("wire")) if light else (None, None)
        beside = {"original": original, "wire": wire, "freeze": config.get("freeze"), "base": base}
        return SavedFactors(directory, ZOConfig(**own).filled(), seed, steps, **beside)
    except (KeyError, TypeError) as error:
        raise UserError(f"model: {directory / STATE} was edited: {error}") from error
