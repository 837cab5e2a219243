"""The benchmark of snapshots, on tiny shapes."""

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole.bench.snapshots import MODES, REPLAY, lines_of
from keyhole.cli import main


@pytest.mark.matrix
def test_runs_on_a_cpu(tmp_path: Path, capsys: Any) -> None:
    """All modes of two sizes and a replay: JSON and Markdown are written, and nothing is left in the scratch place."""
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    how = ["--batch=2", "--every=2", "--periods=2", "--replay-steps=3", "--device=cpu", "--quick"]
    where = [f"--out={out}", f"--scratch={scratch}", "--sizes=1.3B,2.7B"]
    assert main(["bench", "snapshots", *where, *how]) == 0
    records = json.loads(next(out.glob("*.json")).read_text())["records"]
    assert [r.get("error") for r in records] == [None] * len(records)
    assert [r["case"]["mode"] for r in records] == [*MODES, *(mode for mode in MODES if mode != REPLAY)]
    background = next(r for r in records if r["case"]["mode"] == "background")
    assert background["steps"] == 4 and len(background["write_s"]) == 2
    assert background["copies_bytes"] <= background["pool_bytes"] <= background["weights_bytes"] // 2
    text = next(out.glob("*.md")).read_text()
    assert "| torch.save " in text and "against none" in text and "3 steps in" in text and "against textbook" in text
    saved = next(line for line in lines_of(records) if line.record["name"] == "2.7B textbook torch.save")
    assert saved.none["name"] == "2.7B textbook" and saved.record["wall_s"] > saved.record["write_s"][0] > 0
    assert saved.none["weights_bytes"] == background["weights_bytes"]
    assert list(scratch.iterdir()) == []
