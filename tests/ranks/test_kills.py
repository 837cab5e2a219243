"""Random ranks are killed at random instants; runs go on, on other numbers of ranks, and end as an undisturbed one."""

import random
import signal
import time
from pathlib import Path

import pytest

from keyhole.training.start import train as train_alone
from tests.ranks.launch import Launch, train, written
from tests.ranks.test_training import ZO, assert_same_run
from tests.training.runs import Make

RANK_TIMEOUT_S = 5.0
MOST_S = 30.0  # from a kill to the end of all ranks, on a busy machine


def killed(make: Make, tmp_path: Path, kills: int, seed: int) -> None:
    """One run, killed so many times, at any instant from the start of its processes on."""
    rng, done = random.Random(seed), 0
    settings = ZO | {"max_steps": 24, "batch_size": 1, "save_steps": 3, "placement": "stream", "dtype": "bfloat16"}
    alone, config = (make(name, **settings, rank_timeout=RANK_TIMEOUT_S) for name in ("alone", "killed"))
    assert train_alone(alone) == 0
    life_s = 2.0
    while True:
        begin_s, size = time.perf_counter(), rng.choice((2, 4))
        launch = Launch(size, train, [written(tmp_path, config), "--resume"])
        if done == kills:
            assert launch.end() == [0] * size, launch.printed
            break
        time.sleep(rng.uniform(0.0, life_s))
        victim = rng.randrange(size)
        launch.send(signal.SIGKILL, victim)
        kill_s = time.perf_counter()
        codes = launch.after_a_kill()
        assert time.perf_counter() - kill_s < MOST_S
        if codes[victim] == -signal.SIGKILL and 0 not in codes:
            done += 1
            life_s = min(10.0, life_s * 1.3)  # later each time, so that some are in the middle of training
        elif codes == [0] * size:
            life_s = (time.perf_counter() - begin_s) / 2
    assert_same_run(config, alone)


@pytest.mark.slow
def test_two_kills(make: Make, tmp_path: Path) -> None:
    killed(make, tmp_path, kills=2, seed=0)


@pytest.mark.kills
def test_twenty_kills(make: Make, tmp_path: Path) -> None:
    killed(make, tmp_path, kills=20, seed=1)
