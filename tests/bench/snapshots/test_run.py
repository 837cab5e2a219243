"""The benchmark of snapshots, on tiny shapes."""

import json
from pathlib import Path

import pytest

from keyhole.bench.snapshots.report import none_of
from keyhole.bench.snapshots.run import IN_MEMORY, MODES, STREAMED, bench_snapshots


@pytest.mark.matrix
def test_runs_on_a_cpu(tmp_path: Path) -> None:
    """All modes of two sizes and a replay: JSON and Markdown are written, and nothing is left in the scratch place."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    said: list[str] = []
    how = {"batch": 2, "every": 2, "periods": 2, "replay_steps": 3, "device": "cpu", "quick": True}
    report = bench_snapshots(
        ["1.3B", "2.7B"], out=tmp_path / "out", scratch=scratch, command="t", say=said.append, **how
    )
    found = json.loads(report.paths[0].read_text())
    assert [row["mode"] for row in found["records"]] == [*STREAMED, "replay", *IN_MEMORY, *MODES]
    background = next(row for row in found["records"] if row["mode"] == "background")
    assert background["steps"] == 4 and len(background["write_s"]) == 2
    assert background["copies_bytes"] <= background["pool_bytes"] <= background["weights_bytes"] // 2
    text = report.paths[1].read_text()
    assert "| torch.save " in text and "against none" in text and "3 steps in" in text
    rows = {row["mode"]: row for row in found["records"] if row["model"] == "2.7B"}
    none, saved = rows["textbook"], rows["textbook torch.save"]
    assert none_of(saved, found["records"]) == none and saved["wall_s"] > saved["write_s"][0] > 0
    assert none["weights_bytes"] == rows["none"]["weights_bytes"] and "against textbook" in text
    assert list(scratch.iterdir()) == [] and len(said) == 11
