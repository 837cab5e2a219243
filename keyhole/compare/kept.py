"""What the runs of one process share, so that a run starts within a second; and the score of a model without training,
the first row of every table.

    data       read, drawn and tokenised once per task, seed and length; each run gets its own loader
    hashes     of a model's content: computed once; of data: once for all batch sizes
    day        for chat templates that print it: the day the comparison began, so that all runs have the same tokens

The model is built again for every run: a method leaves hooks, adapters and state in it, and building it (0.3 s for 30
layers) is cheaper than making sure that they are gone.

A model without training is evaluated as a run evaluates (training/validation.py), with the placement, budget, device
and dtype of the comparison's runs. Its result is kept like that of a run, under an id made of the model, the task with
its rows, the dtype and the length to which rows are cut: methods and their settings have no part in it.
"""

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace

from keyhole.compare.file import ZERO_SHOT
from keyhole.compare.plan import Group, Trial
from keyhole.compare.result import Result, finite_tests
from keyhole.config import TrainConfig
from keyhole.config.data import data_settings
from keyhole.data.run import Data, load_data
from keyhole.data.settings import DataSettings
from keyhole.disk.typed_json import finite
from keyhole.eval.rows import BATCH_TOKENS, PASSES
from keyhole.loading import load
from keyhole.methods.workload import Workload
from keyhole.training.base_hash import model_hash
from keyhole.training.validation import Judge, common_metric


class Kept:
    """Data and hashes, each loaded or computed once."""

    def __init__(self) -> None:
        self.data: dict[str, Data] = {}
        self.hashes: dict[str, str | None] = {}
        self.prints: dict[str, str] = {}
        self.day: str | None = None

    def model_hash(self, model: str) -> str | None:
        """The content hash of one of the compared models."""
        if model not in self.hashes:
            self.hashes[model] = model_hash(model)
        return self.hashes[model]

    def load_data(self, settings: DataSettings) -> Data:
        """The data of a run, with a loader that begins at the first row."""
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


def untrained_id(trial: Trial, groups: list[Group], kept: Kept) -> str:
    """The id of the result: equal for all runs that would begin from the same score."""
    config, values = trial.config, asdict(trial.config)
    keys = ("task", "task_data", "task_splits", "num_train", "num_dev", "num_eval", "dtype", "max_length", "seed")
    told: list[object] = [kept.model_hash(config.model) or config.model, *(values[key] for key in keys)]
    told.append(questions(kept.load_data(data_settings(config))))
    told += [wire] if (wire := _wire(trial, groups)) is not None else []
    digest = hashlib.blake2b(json.dumps(told).encode(), digest_size=6).hexdigest()
    return f"{trial.id.rsplit('-', 2)[0]}-{ZERO_SHOT}-{digest}"


def _wire(trial: Trial, groups: list[Group]) -> str | None:
    """None, the model as it is, unless every run of the task keeps its weights in another format: the model may fit
    host memory in no other."""
    place = (trial.model, trial.task)
    of_task = [group for group in groups if (group.model, group.task) == place]
    wires = [other.config.wire for group in of_task for other in group.trials.values()]
    return None if None in wires else trial.config.wire


def score_untrained(
    trial: Trial,
    made: Result,
    groups: list[Group],
    kept: Kept,
    allow_code_execution: bool,
    failed: Callable[[Result, Exception], Result],
) -> Result:
    """Completes the result `made` with the metrics of the model that the run would train; failed: makes a result of an
    error."""
    config, data = trial.config, kept.load_data(data_settings(trial.config))
    judge = Judge(data.dev, data.test, config.max_length, allow_code_execution)
    made.dev_metric, made.test_metric = judge.metric or "loss", common_metric(data.test)
    try:
        model = load(
            config.model,
            dtype=config.dtype or "auto",
            workload=Workload(method="eval", tokens=BATCH_TOKENS, passes=PASSES),
            placement=config.placement,
            gpu_memory=config.gpu_memory,
            device=config.device,
            wire=_wire(trial, groups),
        )
        try:
            made.tests = finite_tests(judge.test_metrics(model, lambda: False) or {})
            dev = judge.dev_metrics(model, lambda: False, has_loss=False) or {}
        finally:
            model.close()
        made.test, made.dev = made.tests.get(f"test_{made.test_metric}"), finite(dev.get(f"eval_{made.dev_metric}"))
    except Exception as error:
        return failed(made, error)
    return made
