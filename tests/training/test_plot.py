"""The curve."""

import json
from pathlib import Path

from keyhole.training.plot import plot_loss, running_mean


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
