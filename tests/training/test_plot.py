"""The curve."""

import json
import warnings
from pathlib import Path

import pytest

from keyhole.training.plot import plot_loss, running_mean
from tests.matrix import in_every_run


def test_running_mean() -> None:
    """The window slides and is shorter at the start."""
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_draws_a_picture(tmp_path: Path) -> None:
    """Losses and evaluations become a PNG; a null loss (NaN) is left out; no steps, no picture."""
    metrics = tmp_path / "metrics.jsonl"
    assert not plot_loss(metrics, tmp_path / "loss.png", "none")
    rows = [{"step": i, "loss": None if i == 3 else 1 / i} for i in range(1, 9)] + [{"step": 8, "eval_loss": 0.3}]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_loss(metrics, tmp_path / "loss.png", "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


@in_every_run(lambda tasks: tasks != 20)
@pytest.mark.parametrize("tasks", [1, 20, 60])
def test_many_tasks_are_drawn_without_a_warning(tmp_path: Path, tasks: int) -> None:
    """The names of their curves have room beside the plot: matplotlib warns where they leave none to it."""
    metrics = tmp_path / "metrics.jsonl"
    scores = {f"{split}_a task with a long name {i} accuracy": 0.5 for i in range(tasks) for split in ("eval", "test")}
    metrics.write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n" + json.dumps({"step": 1, **scores}) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_loss(metrics, tmp_path / "loss.png", "title")
