"""From a comparison to its runs: one group per model, task and method, in it one point per combination of its grids.

    group    SmolLM2-135M, sst2, adamw      points    learning_rate=1e-05; learning_rate=3e-05      runs    point x seed

All configs are made, and so all mistakes found, before the first run begins. A run is identified by a hash of its
settings (all that affect its numbers, not paths or printing), with the content of the model instead of its path; and,
once the data are read, by a hash of the drawn rows and of the task file (with_data). So a comparison that is started
again recognises its finished runs, also after lines were added to its file, and does not reuse results of other data.

What the runs of one process share (Kept), so that each starts within a second:

    data       read, drawn and tokenised once per task, seed and length; each run gets its own loader
    hashes     of a model's content: computed once; of data: once for all batch sizes
    day        for chat templates that print it: the day the comparison began, so that all runs have the same tokens
"""

import copy
import hashlib
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from keyhole.compare.file import Comparison, Entries, text_entries
from keyhole.config import TrainConfig
from keyhole.config.faults import Finding, refuse
from keyhole.config.fields import settings
from keyhole.config.loader import LocatedNode, build_config
from keyhole.config.types import is_null
from keyhole.data.run import Data, load_data
from keyhole.data.settings import DataSettings, data_settings
from keyhole.errors import UserError
from keyhole.machine.text import printable
from keyhole.training.start import flat_config, model_hash

BEST = "load_best_model_at_end"
DEFAULTS = {"save_model": "false", BEST: "true", "logging_steps": "10"}
NO_NUMBER = {
    "model", "output_dir", "logging_steps", "report_to", "sample_answers", "save_model", "save_steps",
    "save_total_limit", "background_save", "journal_sync", "data_cache",
}  # fmt: skip
Point = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Trial:
    model: str
    task: str
    method: str
    point: Point
    seed: int
    config: TrainConfig
    id: str

    @property
    def directory(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def label(self) -> str:
        """`SmolLM2-135M, sst2, adamw, learning_rate=1e-05, seed 0`."""
        return ", ".join(
            [self.model, self.task, self.method, *(f"{k}={v}" for k, v in self.point), f"seed {self.seed}"]
        )


@dataclass(frozen=True)
class Group:
    """All runs of a method on one task and model: points x seeds."""

    model: str
    task: str
    method: str
    points: tuple[Point, ...]
    trials: dict[tuple[Point, int], Trial]


def plan(comparison: Comparison, model_hash: Callable[[str], str | None]) -> tuple[list[Group], list[str]]:
    """The groups in the order model, task, method; and warnings about their settings, without duplicates."""
    groups: list[Group] = []
    warnings: dict[str, None] = {}
    seen: dict[str, Trial] = {}  # by id
    for (model, path), task, method in itertools.product(
        comparison.models.items(), comparison.tasks, comparison.methods
    ):
        layers = (comparison.common, comparison.tasks[task], comparison.methods[method], comparison.overrides)
        base = _merged(text_entries(DEFAULTS), *layers)
        chooses = not _has_no_dev(base)
        if not chooses and not any(BEST in layer for layer in layers):
            base.pop(BEST)
        usual = {"method": method} | ({} if "train_data" in base else {"task": task})
        base = text_entries(usual) | base | text_entries({"model": path, "output_dir": comparison.output_dir})
        trials: dict[tuple[Point, int], Trial] = {}
        source = f"{comparison.source}: {method} on {task}"
        empty = [key for key, entry in base.items() if _is_grid(key, entry.node) and not entry.node.value]
        no_grid = "an empty list is no grid; write a value, or leave the key out"
        refuse(source, [Finding(key, no_grid, base[key].where) for key in empty])
        for point, entries in _points(base):
            for seed in comparison.seeds:
                config, found = build_config(entries | text_entries({"seed": str(seed)}), source)
                warnings |= dict.fromkeys(f"{method} on {task}: {text}" for text in found)
                name = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{model}-{task}-{method}-{seed}")[:80]
                run = f"{name}-{settings_hash(config, model_hash(config.model))}"
                config = replace(config, output_dir=str(Path(comparison.output_dir) / "runs" / run))
                trial = Trial(model, task, method, point, seed, config, run)
                # a value twice, 1e-5 and 0.00001, or two values of a setting that does not affect results
                if seen.setdefault(run, trial) is not trial:
                    raise UserError(
                        f"{comparison.source}: {seen[run].label} and {trial.label} are one run: all settings that "
                        "change its numbers are the same; leave one of them out"
                    )
                trials[point, seed] = trial
        points = tuple(dict.fromkeys(point for point, _ in trials))
        if len(points) > 1 and not chooses:
            raise UserError(
                f"{comparison.source}: {method} on {task}: num_dev=0 leaves nothing to choose one of {len(points)} "
                "points of the grid by (test never chooses); set num_dev, or one value for each setting"
            )
        groups.append(Group(model, task, method, points, trials))
    return groups, list(warnings)


def with_data(group: Group, data_hash: Callable[[TrainConfig], str]) -> Group:
    """The group with ids and directories that include the data's hash. data_hash: of the data of a config."""

    def known(trial: Trial) -> Trial:
        run = f"{trial.id}-{data_hash(trial.config)}"
        return replace(trial, id=run, config=replace(trial.config, output_dir=str(trial.directory.with_name(run))))

    return replace(group, trials={place: known(trial) for place, trial in group.trials.items()})


def settings_hash(config: TrainConfig, content: str | None) -> str:
    """A hash, 12 hex digits, of every setting that affects a run's numbers. content: the model's hash."""
    told = {key: value for key, value in flat_config(config).items() if key not in NO_NUMBER}
    told["model"] = content or config.model
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=6).hexdigest()


def _merged(*layers: Entries) -> Entries:
    """Merges settings; later layers win. A number of steps replaces a number of epochs, and vice versa."""
    merged: Entries = {}
    for layer in layers:
        for key, other in itertools.permutations(("max_steps", "num_train_epochs")):
            if key in layer and other not in layer:
                merged.pop(other, None)
        merged |= layer
    return merged


def _has_no_dev(entries: Entries) -> bool:
    """Whether num_dev is 0, or is 0 at some point of its grid."""
    node = entries["num_dev"].node if "num_dev" in entries and "train_data" not in entries else None
    items = node.value if isinstance(node, yaml.SequenceNode) else [] if node is None else [node]
    return any(isinstance(item, yaml.ScalarNode) and item.value == "0" for item in items)


def _points(entries: Entries) -> Iterator[tuple[Point, Entries]]:
    """Every combination of the grids, in the order of the file."""
    grids = {key: entry.node.value for key, entry in entries.items() if _is_grid(key, entry.node)}
    for values in itertools.product(*grids.values()):
        chosen = dict(zip(grids, values, strict=True))
        point = tuple((key, _shown(node)) for key, node in chosen.items())
        yield point, entries | {key: LocatedNode(node, entries[key].where) for key, node in chosen.items()}


def _is_grid(key: str, node: yaml.Node) -> bool:
    """Whether the list is one of values. Where a value may itself be a list, one that holds lists, or null: in a list
    of texts there is none."""
    if not isinstance(node, yaml.SequenceNode) or key not in settings():
        return False
    kind = settings()[key].type
    arms = typing.get_args(kind) if typing.get_origin(kind) is not list else (kind,)
    if not any(typing.get_origin(arm) is list for arm in arms):
        return True
    return any(isinstance(item, yaml.SequenceNode) or is_null(item) for item in node.value)


def _shown(node: yaml.Node) -> str:
    found = _plain(node)
    return printable(found, len(found)) if isinstance(found, str) else json.dumps(found)


def _plain(node: yaml.Node) -> object:
    return [_plain(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else str(node.value)


class Kept:
    """Data and hashes, each loaded or computed once."""

    def __init__(self) -> None:
        self.data: dict[str, Data] = {}
        self.hashes: dict[str, str | None] = {}
        self.prints: dict[str, str] = {}
        self.day: str | None = None

    def model_hash(self, model: str) -> str | None:
        if model not in self.hashes:
            self.hashes[model] = model_hash(model)
        return self.hashes[model]

    def load_data(self, settings: DataSettings) -> Data:
        if settings.template_date is None:
            settings = replace(settings, template_date=self.day)
        key = repr(settings)
        if key not in self.data:
            self.data[key] = replace(load_data(settings), tokenizer=None)  # a run may give its own another template
        found = self.data[key]
        return replace(found, train=copy.copy(found.train))

    def data_hash(self, config: TrainConfig) -> str:
        """8 hex digits that change with any row of train, dev or test, and with the task file."""
        try:
            settings = data_settings(config)
            key = repr(replace(settings, batch_size=1, gradient_accumulation_steps=1))
            if key not in self.prints:
                data = self.load_data(settings)
                held_out = "" if data.eval.dataset is None else data.eval.dataset.fingerprint
                told = json.dumps([data.train.fingerprint, held_out, questions(data)])
                self.prints[key] = hashlib.blake2b(told.encode(), digest_size=4).hexdigest()
        except Exception:  # a grid point that its data do not fit (max_length): the run itself reports it
            return "unread"
        return self.prints[key]


def questions(data: Data) -> list[list[str]]:
    """The fingerprints of the questions of dev and test, and of their task files."""
    return [
        [task.name, task.fingerprint, "" if task.spec is None else task.spec.fingerprint]
        for task in (*data.dev, *data.test)
    ]
