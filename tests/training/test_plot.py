"""The curve."""

import json
from pathlib import Path

from keyhole.training.reports import plot_loss

CANDIDATES = ["loss over candidates (nats per question)", "loss (nats per token)"]


def test_draws_a_picture(tmp_path: Path) -> None:
    """Losses and evaluations become a PNG; a null loss (NaN) is left out; no steps, no picture."""
    metrics = tmp_path / "metrics.jsonl"
    assert not plot_loss(metrics, tmp_path / "loss.png", "none")
    rows = [{"step": i, "loss": None if i == 3 else 1 / i} for i in range(1, 9)] + [{"step": 8, "eval_loss": 0.3}]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_loss(metrics, tmp_path / "loss.png", "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]
