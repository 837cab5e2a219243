"""benchmarks/learning.py: its runs are comparisons that `keyhole compare` takes."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import learning
from keyhole.compare.file import read_comparison
from keyhole.compare.plan import plan


def test_an_evaluation_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    """Its number is null in metrics.jsonl."""
    (tmp_path / "a" / "run").mkdir(parents=True)
    rows = '{"step": 1, "loss": 1.0, "seconds": 0.5}\n{"step": 1, "eval_loss": 2.0}\n{"step": 2, "eval_loss": null}\n'
    (tmp_path / "a" / "run" / "metrics.jsonl").write_text(rows)
    assert learning.told(tmp_path) == ["  a: dev {1: 2.0}, 0.5000 s per step"]


@pytest.mark.parametrize("name", learning.RUNS)
def test_every_run_is_a_comparison(name: str, tmp_path: Path) -> None:
    """Its settings are checked as those of a run are; each seed and each rate of a grid is a run."""
    args = Namespace(model="demo", task_data=str(tmp_path), out=tmp_path, seeds="", settings=[])
    words = learning.write([name], args, 1.0)
    groups, _ = plan(read_comparison(Path(words[1]), words[2:]), lambda model: None)
    _, seeds, settings = learning.RUNS[name]
    rates = settings.get("learning_rate")  # by default the method's
    assert sum(len(group.trials) for group in groups) == len(seeds) * (len(rates) if isinstance(rates, list) else 1)
