"""Runs the trials of `keyhole bench memory`, and reports after every one."""

from itertools import groupby
from pathlib import Path

from keyhole.bench.gradient.trials import read_trials
from keyhole.bench.memory.report import MemoryReport
from keyhole.bench.memory.worker import MemoryWorker
from keyhole.bench.process import Say, make_job, run_group
from keyhole.bench.report import Record
from keyhole.bench.rows import TABLES


def bench_memory(
    *,
    out: Path,
    command: str,
    table: Path = TABLES / "memory.yaml",
    only: str = "",
    quick: bool = False,
    time_limit_s: float | None = None,
    say: Say = print,
) -> MemoryReport:
    """Returns the report, which has been written to disk. A quick run is on the CPU."""
    trials = read_trials(table, only, quick)
    job = make_job("cpu" if quick else None, quick, 1, 1, time_limit_s)
    report = MemoryReport(out, command, quick)

    def receive(found: Record) -> None:
        report.add(found)
        if found["kind"] == "case":
            say(" | ".join(report.cells(found)))

    for _, members in groupby(trials, lambda trial: None if quick else trial.shape):
        run_group(MemoryWorker, "keyhole.bench.memory.worker", receive, job, list(members), say)
    return report
