"""The curve."""

import json
import warnings
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from keyhole.training.plot import plot_loss, running_mean
from tests.matrix import in_every_run

CANDIDATES = ["loss over candidates (nats per question)", "loss (nats per token)"]


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


@pytest.mark.parametrize(("by_candidates", "axes"), [(False, ["loss (nats per token)"]), (True, CANDIDATES)])
def test_losses_of_two_kinds_have_two_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_candidates: bool, axes: list[str]
) -> None:
    """Trained by candidates a loss is per question, an evaluation's is per token: both were drawn as nats per token."""
    metrics, seen = tmp_path / "metrics.jsonl", []
    metrics.write_text('{"step": 1, "loss": 0.7}\n{"step": 1, "eval_loss": 5.0, "eval_tokens": 9}\n')
    draw = FigureCanvasAgg.print_png
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda self, file: seen.append(self.figure) or draw(self, file))
    assert plot_loss(metrics, tmp_path / "loss.png", "title", by_candidates)
    assert [one.get_ylabel() for one in seen[0].axes] == axes
    assert len(seen[0].axes[0].get_legend().get_texts()) == 2


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
