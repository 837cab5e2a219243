"""benchmarks/fp8_long.py, shortened: what its columns are."""

import json
from pathlib import Path

import pytest

from benchmarks import fp8_long


def test_it_tells_learning_from_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The runs that get the updates of the fp32 run differ from it by rounding alone: fp8 by more than bf16, growing
    with the steps; the file holds what the table shows."""
    monkeypatch.setattr(fp8_long, "QUICK", {"steps": 2, "every": 2, "questions": 8})
    found = fp8_long.main(["--quick", "--out", str(tmp_path), "--lr", "2e-4"])
    first, last = ({name: points[i] for name, points in found["runs"].items()} for i in (0, -1))
    assert first["fp32"]["moved"] == first["fp32"]["from_fp32"] == last["fp32"]["from_fp32"] == 0.0
    assert 0 < last["bf16, updates of fp32"]["from_fp32"] < last["fp8, updates of fp32"]["from_fp32"]
    grown = last["fp8, updates of fp32"]["from_fp32"] - first["fp8, updates of fp32"]["from_fp32"]
    assert grown > 10 * last["bf16, updates of fp32"]["from_fp32"]
    assert last["fp8"]["loss"] != first["fp8"]["loss"] and "loss" not in last["fp8, updates of fp32"]
    assert json.loads((tmp_path / "fp8_long.json").read_text())["runs"] == found["runs"]
    assert "| fp8, updates of fp32 |" in capsys.readouterr().out
