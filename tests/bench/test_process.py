"""Workers: every case gets a record, whatever becomes of the process."""

import io
import json
import runpy
import sys
from dataclasses import asdict
from typing import Any

import pytest

from keyhole.bench.process import PREFIX, Job, make_job, run_apart
from keyhole.bench.zo.cases import Case
from keyhole.errors import UserError

CASES = [Case("13B", "resident", dtype="fp32"), Case("13B", "streamed", dtype="fp32")]


def run(deadline_s: float, module: str = "keyhole.bench.zo.worker") -> list[dict[str, Any]]:
    """The records of both cases, but for the marks of their beginnings."""
    got: list[dict[str, Any]] = []
    run_apart(module, got.append, Job("cpu", True, 1, 1, deadline_s), CASES, print)
    return [record for record in got if record["kind"] != "begin"]


def test_a_worker_reports_back() -> None:
    """From a process of its own: the machine first, then a record per case, in order, with what was measured."""
    machine, *records = run(4e9, "tests.bench.idle_worker")
    assert machine["kind"] == "machine" and machine["device"] == "cpu" and machine["versions"]["torch"]
    assert [r["name"] for r in records] == [case.name for case in CASES]
    assert [r["measured"] for r in records] == ["resident", "streamed"]


def test_the_worker_of_zo_is_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m keyhole.bench.zo.worker` reads a job and writes records; the same bits from both placements."""
    told = {"job": asdict(Job("cpu", True, 1, 1, 4e9)), "cases": [asdict(case) for case in CASES]}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(told)))
    with pytest.raises(SystemExit) as end, pytest.warns(RuntimeWarning, match="keyhole.bench.zo.worker"):
        runpy.run_module("keyhole.bench.zo.worker", run_name="__main__")
    lines = [line.removeprefix(PREFIX) for line in capsys.readouterr().out.splitlines() if line.startswith(PREFIX)]
    records = [record for record in map(json.loads, lines) if record["kind"] == "case"]
    assert end.value.code == 0 and [r["name"] for r in records] == [case.name for case in CASES]
    assert records[0]["losses"] == records[1]["losses"] and len(records[0]["losses"]) == 2


def test_a_worker_that_dies_leaves_errors_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is in the record."""
    monkeypatch.setattr(sys, "executable", "false")
    got = run(4e9)
    assert [r["status"] for r in got] == ["error", "error"] and "exit code 1" in got[0]["error"]


def test_no_worker_starts_after_the_limit() -> None:
    """The cases are skipped."""
    assert [r["status"] for r in run(0.0)] == ["skipped", "skipped"]


@pytest.mark.parametrize(("device", "quick"), [("tpu", True), ("cpu", False)])
def test_devices_that_make_no_sense_are_refused(device: str, quick: bool) -> None:
    """An unknown one, and a CPU for full shapes."""
    with pytest.raises(UserError):
        make_job(device, quick, 1, 1, None)
    assert make_job("cpu", True, 1, 1, None).deadline_s > 4e9 / 3
