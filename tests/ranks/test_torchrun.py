"""The real torchrun: two agents on the loopback, one rank each, as two machines.

The agents are forks in which torch is imported already. What they start are new processes, `python -m keyhole`, as a
user's are; in every run forks that call the same command, which saves the imports of two interpreters.
"""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keyhole.training.start import train as train_alone
from tests.matrix import in_every_run
from tests.ranks.launch import LIMIT_S, train, written
from tests.ranks.test_training import ZO, assert_same_run
from tests.training.children import server
from tests.training.runs import Make


def print_into(out: Path) -> None:
    for stream in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)


def agent(words: list[str], out: Path, env: dict[str, str], forks: bool) -> None:
    """`torchrun WORDS -m keyhole train FILE`, which prints into a file. forks: what it starts are not new processes."""
    print_into(out)
    os.environ.update(env)
    from torch.distributed import run

    if not forks:
        return run.main(words)
    config, _, (*_, file) = run.config_from_args(run.parse_args(["--start-method", "fork", *words]))
    run.elastic_launch(config, rank)(file, out)


def rank(file: str, out: Path) -> None:
    print_into(out)
    assert train([file]) == 0


@in_every_run(lambda forks: forks)
@pytest.mark.slow
@pytest.mark.parametrize("forks", [True, False])
def test_two_agents_on_the_loopback_are_two_machines(make: Make, tmp_path: Path, forks: bool) -> None:
    """`torchrun --nnodes 2 ... -m keyhole train`: both agents end well, and the run is that of one process."""
    alone, two = (make(name, **ZO, max_steps=2, placement="stream") for name in ("alone", "two"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words += ["-m", "keyhole", "train", written(tmp_path, replace(two, save_steps=None))]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    files = [tmp_path / f"agent {number}" for number in range(2)]
    agents = [server.Process(target=agent, args=(words, file, env, forks)) for file in files]
    for each in agents:
        each.start()
    assert train_alone(alone) == 0
    for each in agents:
        each.join(LIMIT_S)
        each.kill()
        each.join()
    said = [file.read_text() for file in files]
    assert [each.exitcode for each in agents] == [0, 0], said
    assert sum("ranks: 2 on 1 machine" in text for text in said) == 1  # both have this host's name
    assert_same_run(two, alone)
