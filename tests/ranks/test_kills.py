"""Random ranks are killed at random instants; runs go on, on other numbers of ranks, and end as an undisturbed one."""

import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole.config import TrainConfig
from keyhole.training.start import train as train_alone
from tests.matrix import in_every_run
from tests.ranks.launch import Launch, train, written
from tests.ranks.test_training import ZO, assert_same_run
from tests.training.runs import Make, weights

RANK_TIMEOUT_S = 5.0
MOST_S = 30.0  # from a kill to the end of all ranks, on a busy machine


SHORT = ZO | {"max_steps": 12, "batch_size": 1, "save_steps": 3, "placement": "stream", "dtype": "bfloat16"}
ADAM = SHORT | {"method": "adam-offload", "dtype": None, "adam_epsilon": 1e-3, "threads": 1}


def assert_close(ours: TrainConfig, theirs: TrainConfig) -> None:
    """Of a method whose sums depend on the number of ranks."""
    pairs = weights(ours.output_dir), weights(theirs.output_dir)
    assert pairs[0].keys() == pairs[1].keys()
    for name, tensor in pairs[1].items():
        torch.testing.assert_close(pairs[0][name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n} {m}")


def killed(
    make: Make,
    tmp_path: Path,
    kills: int,
    seed: int,
    life_s: float = 4.0,
    settings: dict[str, Any] = SHORT,
    assert_same: Callable[[TrainConfig, TrainConfig], None] = assert_same_run,
) -> None:
    """One run, killed so many times, at any instant of the first life_s seconds of its processes: later each time, and
    earlier again when the run had ended before."""
    rng, done = random.Random(seed), 0
    alone, config = (make(name, **settings, rank_timeout=RANK_TIMEOUT_S) for name in ("alone", "killed"))
    assert train_alone(alone) == 0
    while done < kills:
        size = rng.choice((2, 4))
        launch = Launch(size, train, [written(tmp_path, config), "--resume"])
        time.sleep(rng.uniform(0.0, life_s))
        victim = rng.randrange(size)
        with suppress(ProcessLookupError):  # the run was quicker
            launch.send(signal.SIGKILL, victim)
        kill_s = time.perf_counter()
        codes = launch.after_a_kill()
        assert time.perf_counter() - kill_s < MOST_S, launch.printed
        assert codes == [0] * size or 0 not in codes or codes[victim] == -signal.SIGKILL, (codes, launch.printed)
        died = codes[victim] == -signal.SIGKILL
        done += died
        life_s = min(12.0, life_s * 1.2) if died else life_s * 0.6
        if codes[0] == 0:
            assert_same(config, alone)
            shutil.rmtree(config.output_dir)
    last = Launch(2, train, [written(tmp_path, config), "--resume"])
    assert last.end() == [0, 0], last.printed
    assert_same(config, alone)


@in_every_run(lambda kills: False)  # test_failures.py has a rank that dies, and the run that goes on
@pytest.mark.parametrize("kills", [1, 2])
def test_few_kills(make: Make, tmp_path: Path, kills: int) -> None:
    killed(make, tmp_path, kills=kills, seed=0, life_s=2.0)


@pytest.mark.kills
def test_twenty_kills(make: Make, tmp_path: Path) -> None:
    killed(make, tmp_path, kills=20, seed=1)


@pytest.mark.kills
def test_twenty_kills_of_ranks_that_have_parts(make: Make, tmp_path: Path) -> None:
    """Goes on from the last checkpoint, which every rank writes a part of."""
    killed(make, tmp_path, kills=20, seed=2, settings=ADAM, assert_same=assert_close)
