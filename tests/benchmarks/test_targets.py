"""Verdicts, from records with known numbers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.targets import judge_zo
from keyhole.bench.cases import TABLES as FILES
from keyhole.bench.cases import Case, read_tables
from keyhole.machine.sizes import GIB

TABLES = read_tables(FILES / "zo.yaml")
JUDGED = TABLES["judged"].cases
STEP_S = {"textbook": 1.0, "resident": 0.4, "streamed": 0.5}


def record(case: Case, **changes: Any) -> dict[str, Any]:
    """A record of a case that meets every target."""
    step_s = STEP_S[case.system] - (0.001 * int(case.gpu_memory[:-3]) if case.gpu_memory else 0)
    found = {
        "kind": "case",
        "name": case.name,
        "case": asdict(case),
        "status": "ok",
        "step_s": step_s,
        "losses": [1.0, 2.0],
        "bytes_up": 24.5e9,
        "bytes_down": 24.5e9,
        "link": {"up": 55.0, "down": 55.0, "duplex": 50.0},
        "weights_bytes": 20 * GIB,
        "host_bytes": 22 * GIB,
        "planned_bytes": 2 * GIB,
        "device": {"reserved_bytes": 2 * GIB},
    }
    return found | changes


def verdicts(**changes: Any) -> dict[tuple[str, str], str]:
    """(what, case) -> verdict, with `changes` applied to the case named in changes["name"]."""
    records = [record(c, **(changes if c.name == changes.get("name") else {})) for c in JUDGED]
    return {(row.what, row.case): row.verdict for row in judge_zo(records)}


def test_all_targets_can_pass() -> None:
    """Good numbers give nothing but passes."""
    assert set(verdicts().values()) == {"pass"}


def test_each_number_can_fail_its_own_row() -> None:
    """A bad number turns the row that looks at it, and the case is named."""
    name = "13B-bf16-b1-streamed"
    for what, changes in {
        "streamed against textbook": {"step_s": 1.1},
        "share of what the link can do": {"bytes_up": 20e9, "bytes_down": 20e9},
        "step against max(compute, link)": {"step_s": 0.56},
        "GPU memory reserved": {"device": {"reserved_bytes": 3 * GIB}},
        "host memory": {"host_bytes": 23 * GIB},
        "planned peak off the measured one by": {"planned_bytes": 3 * GIB},
        "losses equal the resident ones": {"losses": [1.0, 2.5]},
    }.items():
        assert verdicts(name=name, **changes)[what, name] == "FAIL"
    slow = verdicts(name="13B-bf16-b1-streamed-24GiB", step_s=0.9)
    assert slow["step time falls as the budget grows", "13B-bf16-b1-streamed-*GiB"] == "FAIL"
    resident = verdicts(name="1.3B-bf16-b1-resident", step_s=0.6)
    assert resident["resident against textbook", "1.3B-bf16-b1-resident"] == "FAIL"


def test_what_was_not_measured_is_missing() -> None:
    """No records, no passes; a failed case shows its error."""
    assert {row.verdict for row in judge_zo([])} == {"missing"}
    failed = {"kind": "case", "name": "1.3B-bf16-b1-streamed", "status": "error", "error": "out of memory"}
    rows = {row.case: row for row in judge_zo([failed])}
    assert rows["1.3B-bf16-b1-streamed"].measured == "out of memory"


def test_short_batches_are_judged_where_they_were_run() -> None:
    """By their own limit, 1.15 of the link's 0.49 s; they say nothing of the other table."""
    streamed = {case.name for case in TABLES["short"].cases if case.system == "streamed"}
    for step_s, verdict in ((0.55, "pass"), (0.57, "FAIL")):
        records = [record(case) for case in TABLES["short"].cases]
        rows = judge_zo([r | {"step_s": step_s} if r["name"] in streamed else r for r in records])
        found = {(row.what, row.case): row.verdict for row in rows if row.verdict != "missing"}
        assert {name for _, name in found} == streamed
        assert {found["step against max(compute, link)", name] for name in streamed} == {verdict}


def test_checkpoints_must_not_slow_a_run_down() -> None:
    """Against the same model without."""
    rows = [
        {"case": asdict(Case(model, "streamed", saving=saving)), "status": "ok", "tokens_per_s": speed}
        for model, speeds in {"1.3B": (1000.0, 960.0, 400.0), "2.7B": (500.0, 490.0, 300.0)}.items()
        for saving, speed in zip(("", "background", "torch.save"), speeds, strict=True)
    ]
    found = {(row.case, row.measured): row.verdict for row in targets.judge_snapshots(rows)}
    assert found == {("1.3B", "0.960x"): "FAIL", ("2.7B", "0.980x"): "pass"}


def test_recorded_runs_are_read() -> None:
    """Every run that is kept has a verdict for each of its targets."""
    paths = sorted(Path(targets.__file__).parent.glob("records/zo_h200_*.json"))
    assert paths
    for path in paths:
        assert targets.verdicts(path).count("| pass") + targets.verdicts(path).count("| FAIL") > 0, path


def test_a_quick_run_gets_no_verdict(tmp_path: Path) -> None:
    """Tiny shapes prove nothing."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"quick": True, "records": [record(case) for case in JUDGED]}))
    assert "pass" not in targets.verdicts(path)
