"""The score of a model without training, on the dev and test questions of a task: the first row of every table.

It is evaluated as a run evaluates (training/validation.py), with the placement, budget, device and dtype of the
comparison's runs. Its result is kept like that of a run, under an id made of the model, the task with its rows, the
dtype and the length to which rows are cut: methods and their settings have no part in it.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from keyhole.compare.kept import Kept, questions
from keyhole.compare.names import ZERO_SHOT
from keyhole.compare.plan import Group, Trial
from keyhole.compare.result import Result, finite_tests
from keyhole.config.data import data_settings
from keyhole.disk.typed_json import finite
from keyhole.eval.rows import BATCH_TOKENS, PASSES
from keyhole.loading import load
from keyhole.methods.workload import Workload
from keyhole.training.validation import Judge, common_metric

Failed = Callable[[Result, Exception], Result]


def id_of(trial: Trial, groups: list[Group], kept: Kept) -> str:
    """The id of the result: equal for all runs that would begin from the same score."""
    config = trial.config
    keys = ("task", "task_data", "task_splits", "num_train", "num_dev", "num_eval", "dtype", "max_length", "seed")
    told = [kept.model_hash(config.model) or config.model, *(getattr(config, key) for key in keys)]
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


def score(
    trial: Trial, made: Result, groups: list[Group], kept: Kept, allow_code_execution: bool, failed: Failed
) -> Result:
    """Completes the result `made` with the metrics of the model that the run would train; failed: makes a result of an
    error."""
    config, data = trial.config, kept.load_data(data_settings(trial.config))
    judge = Judge(data.dev, data.test, config.max_length, allow_code_execution)
    made.dev_metric, made.test_metric = judge.metric or "loss", common_metric(data.test)
    work = Workload(method="eval", tokens=BATCH_TOKENS, passes=PASSES)
    where: dict[str, Any] = {"placement": config.placement, "gpu_memory": config.gpu_memory, "device": config.device}
    where |= {"wire": _wire(trial, groups)}
    try:
        model = load(config.model, dtype=config.dtype or "auto", workload=work, **where)
        try:
            made.tests = finite_tests(judge.test_metrics(model, lambda: False) or {})
            dev = judge.dev_metrics(model, lambda: False, has_loss=False) or {}
        finally:
            model.close()
        made.test, made.dev = made.tests.get(f"test_{made.test_metric}"), finite(dev.get(f"eval_{made.dev_metric}"))
    except Exception as error:
        return failed(made, error)
    return made
