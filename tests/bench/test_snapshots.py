"""The benchmark of snapshots, on tiny shapes."""

import json
import tempfile
from pathlib import Path

import pytest

from keyhole.bench import snapshots
from keyhole.bench.snapshots import by_mode
from keyhole.cli import main


def test_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All modes and a replay: JSON and Markdown are written, and nothing is left in the scratch place."""
    monkeypatch.setattr(snapshots, "REPLAYED", 3)
    monkeypatch.setattr(snapshots, "EVERY", 2)
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert main(["bench", "snapshots", f"--output-dir={out}", "--models=1.3B", "--device=cpu", "--quick"]) == 0
    records = json.loads(next(out.glob("*.json")).read_text())["records"]
    assert [r.get("error") for r in records] == [None] * len(records)
    found = by_mode(records)
    modes = {"none", "background", "torch.save", "textbook", "textbook torch.save", "replay"}
    assert {mode for _, mode in found} == modes and len(found) == 6
    background = found["1.3B", "background"]
    assert background["steps"] == 4 and len(background["write_s"]) == 2
    assert background["copies_bytes"] <= background["pool_bytes"] <= background["weights_bytes"] // 2
    text = next(out.glob("*.md")).read_text()
    assert "| torch.save " in text and "against none" in text and "3 steps in" in text and "against textbook" in text
    saved = found["1.3B", "textbook torch.save"]
    assert saved["wall_s"] > saved["write_s"][0] > 0
    assert found["1.3B", "textbook"]["weights_bytes"] == background["weights_bytes"] and not list(scratch.iterdir())
    assert [found["1.3B", mode]["steps"] for mode in ("none", "torch.save", "replay")] == [2, 2, 3]
    per_step = {round(r["tokens_per_s"] * r["wall_s"] / r["steps"], 6) for r in records}
    assert len(per_step) == 1 and per_step.pop() > 1
