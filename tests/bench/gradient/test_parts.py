"""The LSP benchmark runs, every trial of it."""

import json
from pathlib import Path

from keyhole.bench.gradient import bench_gradient
from keyhole.bench.lsp import TRIALS


def test_every_trial_runs_on_tiny_shapes(tmp_path: Path) -> None:
    """No trial fails, the first ones are those that matter, and the host's part of a step is in the record."""
    bench_gradient("lsp", out=tmp_path, command="t", only="7B", quick=True, steps=1, warm_up=1, say=lambda line: None)
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    records = {r["trial"]["name"]: r for r in found["records"]}
    assert [r.get("error") for r in records.values()] == [None] * sum(trial.shape == "7B" for trial in TRIALS)
    assert list(records)[0] == "7B native adamw"
    on_host = records["7B lsp d=2048 cpu compiled"]
    assert all(on_host["parts"][f"{part}_s"] > 0 for part in ("forward", "reverse", "update", "layer_update"))
    assert on_host["parts"]["host_wait_s"] > 0 and on_host["bytes_up"] > 0 and on_host["bytes_down"] > 0
    assert records["7B lsp d=2048 compiled"]["bytes_up"] == 0
    mixed = records["7B lsp d=2048 17GB compiled"]
    assert 0 < mixed["bytes_down"] < on_host["bytes_down"] and mixed["parts"]["exposed_update_s"] > 0
    assert "exposed: CPU" in next(tmp_path.glob("*.md")).read_text()
