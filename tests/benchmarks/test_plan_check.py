"""Planned against measured: the cases cover what they should, and one runs."""

from pathlib import Path

from benchmarks import plan_check
from benchmarks.plan_check import CASES, summary
from keyhole.methods import METHODS


def test_the_cases_cover_methods_placements_shapes_and_batches() -> None:
    """All different."""
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.method for case in CASES} == set(METHODS)
    assert {case.system for case in CASES} == {"resident", "streamed"} and any(case.gpu_memory for case in CASES)
    assert len({case.model for case in CASES}) == len({(case.batch, case.length) for case in CASES}) == 2


def test_a_case_is_measured_with_its_rates(tmp_path: Path, capsys: object) -> None:
    """On a tiny shape; a record of it is read again, and the summary counts it."""
    plan_check.main(["--quick", "--only", "lomo Llama-3.5B-bf16-b1-t512-streamed", "--out", str(tmp_path)])
    (line,) = plan_check.recorded(next(tmp_path.glob("*.json")))
    assert line.planned["seconds"] > 0 < line.measured["seconds"] and line.measured["host"] > 0
    assert any(told.startswith("seconds: ") for told in summary([line]))
