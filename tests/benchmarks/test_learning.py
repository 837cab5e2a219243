"""benchmarks/learning.py: its runs are comparisons that `keyhole compare` takes."""

from pathlib import Path

import pytest

from benchmarks import learning
from keyhole.compare.file import read_comparison
from keyhole.compare.plan import plan


@pytest.mark.parametrize("name", learning.RUNS)
def test_every_run_is_a_comparison(name: str, tmp_path: Path) -> None:
    """Its settings are checked as those of a run are, and each seed is a run."""
    words = learning.write(name, "demo", tmp_path, 1.0, [])
    groups, _ = plan(read_comparison(Path(words[1]), words[2:]), lambda model: None)
    assert sum(len(group.trials) for group in groups) == len(learning.RUNS[name][1])
