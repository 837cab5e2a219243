"""benchmarks/learning.py: its runs are comparisons that `keyhole compare` takes."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import learning
from keyhole.compare.file import read_comparison
from keyhole.compare.plan import plan


@pytest.mark.parametrize("name", learning.RUNS)
def test_every_run_is_a_comparison(name: str, tmp_path: Path) -> None:
    """Its settings are checked as those of a run are; each seed and each rate of a grid is a run."""
    args = Namespace(model="demo", task_data=str(tmp_path), out=tmp_path, seeds="", settings=[])
    words = learning.write(name, args, 1.0)
    groups, _ = plan(read_comparison(Path(words[1]), words[2:]), lambda model: None)
    _, seeds, settings = learning.RUNS[name]
    rates = settings["learning_rate"]
    assert sum(len(group.trials) for group in groups) == len(seeds) * (len(rates) if isinstance(rates, list) else 1)
