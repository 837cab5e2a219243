"""The real torchrun: two agents on the loopback, one rank each, as two machines."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keyhole.training.start import train as train_alone
from tests.ranks.launch import written
from tests.ranks.test_training import ZO, assert_same_run
from tests.training.runs import Make


@pytest.mark.slow
def test_two_agents_on_the_loopback_are_two_machines(make: Make, tmp_path: Path) -> None:
    """`torchrun --nnodes 2 ... -m keyhole train`: both agents end well, and the run is that of one process."""
    alone, two = (make(name, **ZO, max_steps=2, placement="stream") for name in ("alone", "two"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words += ["-m", "keyhole", "train", written(tmp_path, replace(two, save_steps=None))]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    agents = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    assert train_alone(alone) == 0
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("ranks: 2 on 1 machine" in text for text in said) == 1  # both have this host's name
    assert_same_run(two, alone)
