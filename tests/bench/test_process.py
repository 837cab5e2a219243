"""Workers: every case gets a record, whatever becomes of the process."""

import time
from typing import Any

from keyhole.bench.cases import Case
from keyhole.bench.process import Job, Measure, make_job, run_apart
from tests.bench.idle_worker import die, lose_the_context, measure_nothing

CASES = [Case("13B", "resident", dtype="fp32"), Case("13B", "streamed", dtype="fp32")]


def run(deadline_s: float, measure: Measure = measure_nothing) -> list[dict[str, Any]]:
    """The records of both cases."""
    got: list[dict[str, Any]] = []
    run_apart(measure, CASES, Job("cpu", True, 1, 1, deadline_s), got.append)
    return got


def test_a_worker_reports_back() -> None:
    """From a process of its own: the machine first, then a record per case, in order, with what was measured."""
    machine, *records = run(4e9)
    assert machine["kind"] == "machine" and machine["device"] == "cpu" and machine["versions"]["torch"]
    assert [r["name"] for r in records] == [case.name for case in CASES]
    assert [r["measured"] for r in records] == ["resident", "streamed"]


def test_a_worker_that_dies_leaves_errors_not_silence() -> None:
    """The exit code is in the record, and another worker takes the rest; so it does after an error of CUDA."""
    errors = [r["error"] for r in run(4e9, die) if r["kind"] == "case"]
    assert len(errors) == 2 and "exit code 7" in errors[0] and "exit code 8" in errors[1]
    records = run(4e9, lose_the_context)
    assert [r["kind"] for r in records] == ["machine", "case"] * 2
    assert all("illegal memory access" in r["error"] for r in records[1::2])


def test_no_worker_starts_after_the_limit() -> None:
    assert [r["status"] for r in run(0.0)] == ["skipped", "skipped"]
    assert make_job("cpu", True, 1, 1, None).deadline_s > time.time() + 1e6, "no limit is none"
