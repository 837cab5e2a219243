"""A checkpoint with low-rank factors, as a model.

Evaluation, chat and `keyhole.load` know nothing of methods: loading the directory of a checkpoint also loads its
factors, beside the weights as in training; the weights of a light one (factors.py) are read from the original model of
its run. A method that is then made on the model gets everything folded into the weights. A finished run needs none of
this: its output directory holds an ordinary model.
"""

from dataclasses import dataclass
from pathlib import Path

from keyhole.disk.json_text import read_json
from keyhole.disk.tensors import MethodState
from keyhole.disk.weight_files import content_hash
from keyhole.errors import UserError
from keyhole.methods.settings import check_values
from keyhole.methods.zo.low_rank.factors import Factors
from keyhole.methods.zo.low_rank.layers import FactoredLayers
from keyhole.methods.zo.traits import ZO, ZOConfig
from keyhole.model.model import Model
from keyhole.model.structure.reach import frozen_as
from keyhole.model.structure.source import find_directory

STATE, TENSORS = "keyhole_state.json", "optimizer.safetensors"  # as checkpoint/state.py has them


@dataclass(frozen=True)
class SavedFactors:
    """Factors in a directory."""

    directory: Path
    own: ZOConfig  # filled: without settings that are null for the estimator's default
    steps: int
    # The model whose weights they belong to: those that change are with the factors, a new head too. None: the weights
    # in the directory.
    original: str | None
    wire: str | None = None  # the format of these weights: factors were trained beside the rounded weights
    freeze: str | list[str] | None = None  # what the run did not train has no factors
    base: str | None = None  # the hash of the original's weights

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
                factors.load(MethodState({}, self.directory / TENSORS), self.steps)
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
    wire, freeze, base = config.get("wire"), config.get("freeze"), found.get("base")
    if not method.get("light"):
        return SavedFactors(directory, settings, steps, None, None, freeze, base)
    if not isinstance(original, str):
        raise UserError(f"model: {directory} holds no weights, and {STATE} does not say whose factors these are")
    return SavedFactors(directory, settings, steps, original, wire, freeze, base)
