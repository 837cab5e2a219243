"""The curve."""

import json
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

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
