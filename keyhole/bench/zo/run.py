"""Runs the chosen cases of `keyhole bench zo`, a worker process for each group, and reports after every case."""

from pathlib import Path

from keyhole.bench.process import Say, make_job, run_apart, run_cases
from keyhole.bench.report import Record
from keyhole.bench.rows import TABLES
from keyhole.bench.zo.cases import grouped, read_tables, select
from keyhole.bench.zo.report import ZoReport, one_line


def bench_zo(
    words: list[str],
    *,
    out: Path,
    command: str,
    table: Path = TABLES / "zo.yaml",
    device: str | None = None,
    quick: bool = False,
    steps: int = 5,
    warm_up: int = 6,
    time_limit_s: float | None = None,
    say: Say = print,
) -> ZoReport:
    """Returns the report, which is on disk already. words: tables, `all`, or patterns of case names."""
    tables = select(words, read_tables(table))
    job = make_job(device, quick, warm_up, steps, time_limit_s)
    report = ZoReport(out, tables, command, quick)

    def receive(found: Record) -> None:
        report.add(found)
        if line := one_line(found):
            say(line)

    for cases in grouped(tables):
        if quick:  # in this process: starting another would take longer than the work
            from keyhole.bench.zo.worker import ZoWorker

            run_cases(ZoWorker, receive, job, cases)
        else:
            run_apart("keyhole.bench.zo.worker", receive, job, cases, say)
    return report
