"""The whole command on tiny shapes, with failures on the way."""

import json
from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole.bench.zo.run import bench_zo
from keyhole.cli import main

CASES = ",".join(
    "6.7B-bf16-" + case for case in ("b1-resident", "b1-textbook", "b1-streamed*", "b4-resident", "b4-streamed")
)


def quick(tmp_path: Path, *args: str) -> tuple[dict[str, Any], str]:
    """Runs the command; returns its JSON and Markdown."""
    assert main(["bench", "zo", "--quick", "--steps=1", "--warm-up=1", f"--out={tmp_path}", "--device=cpu", *args]) == 0
    (json_path,), (markdown_path,) = tmp_path.glob("*.json"), tmp_path.glob("*.md")
    return json.loads(json_path.read_text()), markdown_path.read_text()


@pytest.mark.slow
def test_quick_run_end_to_end(tmp_path: Path, capsys: Any) -> None:
    """Every case has a record, switching parts off changes no loss, and both files say what ran."""
    found, markdown = quick(tmp_path, f"--cases={CASES}")
    records = {r["name"]: r for r in found["records"]}
    assert all(r["status"] == "ok" and r["step_s"] > 0 and len(r["losses"]) == 2 for r in records.values())
    for batch, count in ((1, 6), (4, 1)):
        start = f"6.7B-bf16-b{batch}-"
        streamed = [r for n, r in records.items() if n.startswith(f"{start}streamed") and "wire" not in n]
        assert len(streamed) == count
        assert all(r["losses"] == records[f"{start}resident"]["losses"] for r in streamed)
    assert records["6.7B-bf16-b1-streamed"]["bytes_down"] > 0  # up: so few blocks never leave their slots
    assert found["commit"] and found["quick"] and found["machine"]["versions"]["torch"]
    assert "keyhole bench zo --cases" in markdown and str(tmp_path) not in markdown
    assert markdown.count("| equal ") >= 2 + 2 + 6 and "DIFFER" not in markdown
    assert {n for n in records if "wire" in n} >= {f"6.7B-bf16-b1-streamed-wire_{f}" for f in ("fp32", "bf16", "fp8")}
    assert "6.7B-bf16-b4-streamed" in capsys.readouterr().out


def test_a_failing_case_costs_only_itself(tmp_path: Path, monkeypatch: Any) -> None:
    """The error is in the table, the next case runs."""
    load = keyhole.load

    def fails_when_streamed(*args: Any, **kwargs: Any) -> Any:
        if kwargs["placement"] == "stream" and kwargs["gpu_memory"] is None:
            raise MemoryError("no such luck")
        return load(*args, **kwargs)

    monkeypatch.setattr(keyhole, "load", fails_when_streamed)
    found, markdown = quick(tmp_path, "--cases=giant")
    status = {r["name"]: r["status"] for r in found["records"]}
    assert list(status.values()) == ["ok", "error", "ok"]
    assert "no such luck" in markdown


def test_the_time_limit_skips_what_would_not_fit(tmp_path: Path) -> None:
    """A limit of nothing runs nothing, and says so."""
    report = bench_zo(["giant"], out=tmp_path, command="", device="cpu", quick=True, time_limit_s=-1.0)
    assert [r["status"] for r in report.records] == ["skipped"] * 3
    assert "time limit" in report.markdown()


def test_tables_of_the_user_s_own(tmp_path: Path) -> None:
    """A file of cases instead of the shipped ones."""
    path = tmp_path / "own.yaml"
    path.write_text("mine: {title: My cases, cases: [{model: 2.7B, dtype: fp32, system: resident}]}")
    found, markdown = quick(tmp_path, f"--table={path}", "--cases=mine")
    assert [r["name"] for r in found["records"]] == ["2.7B-fp32-b1-resident"]
    assert "## My cases" in markdown and f"--table {path}" in found["command"]


@pytest.mark.parametrize(
    "args", [("--cases=nothing",), ("--device=cpu",), ("--device=tpu", "--quick"), ("--quick", "--table=no.yaml")]
)
def test_user_mistakes(args: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    """One message, exit code 2, nothing written."""
    assert main(["bench", "zo", f"--out={tmp_path}", *args]) == 2
    assert capsys.readouterr().err.startswith("keyhole: ")
    assert not list(tmp_path.iterdir())
