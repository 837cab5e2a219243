"""`keyhole train` on several ranks is `keyhole train` on one: weights, losses, journal, evaluation, resume."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keyhole.checkpoint.journal import read
from keyhole.config import TrainConfig
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.methods.zo.traits import ZOConfig
from keyhole.ranks import Ranks
from keyhole.training.start import Parts
from keyhole.training.start import train as train_alone
from tests.matrix import in_every_run
from tests.ranks.launch import Launch, train, written
from tests.training.runs import Make, metrics, same, weights

ZO = {"method": "zo", "learning_rate": 1e-3, "batch_size": 2, "gradient_accumulation_steps": 4, "save_steps": 2}
LOW_RANK = {"max_steps": 4, "learning_rate": 1e-2, "zo": ZOConfig(rank=2, refresh=2)}


def records(config: TrainConfig) -> list[Any]:
    return read(Path(config.output_dir) / "run" / "journal").records


def assert_same_run(ours: TrainConfig, theirs: TrainConfig) -> None:
    assert same(weights(ours.output_dir), weights(theirs.output_dir))
    assert metrics(ours) == metrics(theirs)
    assert records(ours) == records(theirs)


def run(size: int, config: TrainConfig, tmp_path: Path, *options: str) -> Launch:
    """A run on so many ranks, to its end."""
    launch = Launch(size, train, [written(tmp_path, config), *options])
    assert launch.end() == [0] * size, launch.printed
    return launch


def test_two_ranks_are_one_and_resume_on_any_number(make: Make, tiny_data: Path, tmp_path: Path) -> None:
    """Two steps on two ranks, one more on four, one more in one process, each evaluated: what a single process writes.
    Only the leader prints."""
    settings = ZO | {"eval_data": str(tiny_data), "eval_steps": 1, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    alone, some = (make(name, **settings, max_steps=4) for name in ("alone", "some"))
    assert train_alone(alone) == 0
    launch = run(2, replace(some, max_steps=2), tmp_path)
    assert "ranks: 2 on 1 machine; gloo" in launch.printed[0] and launch.printed[1] == ""
    run(4, replace(some, max_steps=3), tmp_path, "--resume")
    assert train_alone(some, resume="last") == 0
    assert_same_run(some, alone)


@pytest.mark.parametrize("more", [{}, pytest.param(LOW_RANK, marks=pytest.mark.slow)], ids=["dense", "low rank"])
def test_a_short_last_step_leaves_a_rank_without_work(more: dict[str, Any], make: Make, tmp_path: Path) -> None:
    """24 rows in steps of 20: the second step has one micro-batch for two ranks. They share one copy of the streamed
    blocks; factors are folded into it at the end of each period, by all together, the rank without rows too."""
    settings = ZO | {"batch_size": 5, "max_steps": 2, "placement": "stream", "dtype": "bfloat16"} | more
    alone, two = (make(name, **settings) for name in ("alone", "two"))
    assert train_alone(alone) == 0
    run(2, two, tmp_path)
    assert_same_run(two, alone)


@pytest.mark.slow
@in_every_run(lambda fold: not fold)  # kept V of all periods; LOW_RANK folds
@pytest.mark.parametrize("fold", [True, False], ids=["merged", "kept"])
def test_guided_directions_on_ranks_are_those_of_one(fold: bool, make: Make, tmp_path: Path) -> None:
    """Every rank finds V from all rows. The third step begins a period; its checkpoint is lost, so ranks resume by its
    record, with V from the leader's file."""
    settings = ZO | {"max_steps": 4, "placement": "stream", "dtype": "bfloat16", "learning_rate": 1e-2}
    settings |= {"zo": ZOConfig(rank=1, refresh=2, guide=8, fold=fold), "lr_scheduler_type": "constant"}
    alone, two = (make(name, **settings) for name in ("alone", "two"))
    assert train_alone(alone) == 0
    run(2, replace(two, max_steps=3), tmp_path)
    shutil.rmtree(Path(two.output_dir) / "checkpoint-3")
    launch = run(2, two, tmp_path, "--resume")
    assert "1 steps of the journal replayed" in launch.printed[0]
    assert_same_run(two, alone)


class Three(Ranks):
    """The first of three."""

    size = 3


def test_what_several_ranks_cannot_do_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of micro-batches that does not divide, a method that trains in one process."""
    parts = Parts(ranks=Three())
    with pytest.raises(UserError, match="gradient_accumulation_steps=4.*multiple of their number, 3; set it to 6"):
        train_alone(make("out", **ZO), parts=parts)
    monkeypatch.setitem(METHODS, "adamw", replace(METHODS["adamw"], ranks=None))
    with pytest.raises(UserError, match="method=adamw trains in one process.*zo"):
        train_alone(make("out", method="adamw", gradient_accumulation_steps=3), parts=parts)
