"""kill -9 at any instant: a run that is resumed ends with the bits of one that was never killed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = {"zo": 10, "adamw": 4}  # `python -m tests.crash DIR` has 200


@pytest.mark.slow
@pytest.mark.parametrize("method", KILLS)
def test_killed_and_resumed_to_the_bit(tiny_model: Path, tiny_data: Path, tmp_path: Path, method: str) -> None:
    """At random instants, and at random writes, flushes, renames and deletions, in snapshots too."""
    model = ["--model", str(tiny_model), "--data", str(tiny_data), "--method", method]
    command = [
        sys.executable,
        "-m",
        "tests.crash",
        "--kills",
        str(KILLS[method]),
        "--steps",
        "14",
        *model,
        str(tmp_path),
    ]
    how = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "cwd": Path(__file__).parents[2], "timeout": 400}
    done = subprocess.run(command, capture_output=True, text=True, **how)
    log = (tmp_path / f"{method}.log").read_text() if (tmp_path / f"{method}.log").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    found = re.search(r"(\d+) kills \((\d+) from outside, (\d+) at a call\)", done.stdout)
    assert found and int(found[1]) == KILLS[method] and int(found[2]) > 0 and int(found[3]) > 0
    assert "Traceback" not in log
