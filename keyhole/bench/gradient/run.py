"""Runs the trials of `keyhole bench lomo | lsp`, a worker process for each row of trials of one shape."""

from itertools import groupby
from pathlib import Path

from keyhole.bench.gradient.report import GradientReport
from keyhole.bench.gradient.trials import read_trials
from keyhole.bench.process import Say, make_job, run_apart
from keyhole.bench.report import Record


def bench_gradient(
    table: Path,
    *,
    out: Path,
    command: str,
    only: str = "",
    quick: bool = False,
    steps: int = 5,
    warm_up: int = 2,
    time_limit_s: float | None = None,
    say: Say = print,
) -> GradientReport:
    """Returns the report, which has been written to disk. A quick run is on the CPU."""
    trials = read_trials(table, only, quick)
    job = make_job("cpu" if quick else None, quick, warm_up, steps, time_limit_s)
    report = GradientReport(table.stem, out, trials, command, quick)

    def receive(found: Record) -> None:
        report.add(found)
        if found["kind"] == "case":
            say(" | ".join(report.cells(found)))

    for _, members in groupby(trials, lambda trial: None if quick else trial.shape):
        run_apart("keyhole.bench.gradient.worker", receive, job, list(members), say)
    return report
