"""Runs the chosen cases of `keyhole bench zo`, a worker process for each group, and reports after every case."""

from pathlib import Path

from keyhole.bench.process import Say, make_job, run_group
from keyhole.bench.report import Record
from keyhole.bench.rows import TABLES
from keyhole.bench.zo.cases import cut, for_models, grouped, read_tables, select
from keyhole.bench.zo.report import ZoReport, one_line
from keyhole.bench.zo.worker import ZoWorker
from keyhole.errors import UserError
from keyhole.machine.host import host_memory
from keyhole.machine.sizes import Bytes


def bench_zo(
    words: list[str],
    *,
    out: Path,
    command: str,
    models: list[str] | None = None,
    host: str | None = None,
    table: Path = TABLES / "zo.yaml",
    device: str | None = None,
    quick: bool = False,
    steps: int = 5,
    warm_up: int = 6,
    time_limit_s: float | None = None,
    say: Say = print,
) -> ZoReport:
    """Returns the report, which has been written to disk. words: tables, `all`, or patterns of case names. models:
    instead of the tables' own. host: models are cut to this much host memory (default: the free memory; not for tiny
    models)."""
    tables = select(words, for_models(read_tables(table), models or []))
    if host is not None or not quick:
        tables, said = cut(tables, _host_bytes(host))
        for line in said:
            say(line)
    job = make_job(device, quick, warm_up, steps, time_limit_s)
    report = ZoReport(out, tables, command, quick)

    def receive(found: Record) -> None:
        report.add(found)
        if line := one_line(found):
            say(line)

    for cases in grouped(tables):
        run_group(ZoWorker, "keyhole.bench.zo.worker", receive, job, cases, say)
    return report


def _host_bytes(text: str | None) -> int:
    if text is None:
        return host_memory().available_bytes
    try:
        return Bytes.parse(text)
    except ValueError as error:
        raise UserError(f"--host-memory: {text!r} is not {error}") from error
