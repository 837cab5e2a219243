"""Runs a file of tables: `keyhole bench zo | lomo | lsp | memory`."""

from pathlib import Path

from keyhole.bench.cases import TABLES, cut, for_models, ordered, read_tables, select
from keyhole.bench.memory import MemoryReport
from keyhole.bench.process import Job, Say, run
from keyhole.bench.report import Report
from keyhole.bench.step_tables import FIRST, ZEROTH, StepReport
from keyhole.errors import UserError
from keyhole.machine.host import host_memory
from keyhole.machine.sizes import Bytes

STEPS, MEMORY = "keyhole.bench.steps:measure_steps", "keyhole.bench.memory:measure_memory"


def bench_tables(
    shipped: str,
    job: Job,
    *,
    out: Path,
    command: str,
    file: Path | None = None,
    words: list[str] | None = None,
    only: str = "",
    models: list[str] | None = None,
    host: str | None = None,
    say: Say = print,
) -> Report:
    """Returns the report, which has been written to disk. shipped: a file of tables/, which has the verb's name; file:
    other tables than that one's. words, only: which cases (select). models: instead of the tables' own. host: models
    are cut to this much host memory (default: the free memory; not for tiny models)."""
    tables = for_models(read_tables(file or TABLES / shipped, job.quick), models or [])
    tables = select(tables, ["all"] if words is None else words, only)
    if host is not None or not job.quick:
        tables, said = cut(tables, _host_bytes(host))
        for line in said:
            say(line)
    report: Report
    verb = Path(shipped).stem
    if shipped == "memory.yaml":
        report = MemoryReport(out, command, job.quick, tables)
    else:
        report = StepReport(verb, out, command, job.quick, tables, ZEROTH if shipped == "zo.yaml" else FIRST)
    run(MEMORY if shipped == "memory.yaml" else STEPS, ordered(tables), job, report, say)
    return report


def _host_bytes(text: str | None) -> int:
    if text is None:
        return host_memory().available_bytes
    try:
        return Bytes.parse(text)
    except ValueError as error:
        raise UserError(f"--host-memory: {text!r} is not {error}") from error
