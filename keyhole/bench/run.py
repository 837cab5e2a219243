"""Runs the tables of a verb: `keyhole bench zo | lomo | lsp | memory | layers | snapshots`."""

from dataclasses import replace
from pathlib import Path

from keyhole.bench.cases import TABLES, for_models, ordered, read_tables, select
from keyhole.bench.layers import LayerReport, measure_layer
from keyhole.bench.memory import MemoryReport, measure_memory
from keyhole.bench.process import Job, Measure, Say, run
from keyhole.bench.report import Report
from keyhole.bench.snapshots import SnapshotReport, measure_saving
from keyhole.bench.step_tables import StepReport
from keyhole.bench.steps import measure_steps

VERBS: dict[str, tuple[Measure, type[Report]]] = {
    "zo.yaml": (measure_steps, StepReport),
    "lomo.yaml": (measure_steps, StepReport),
    "lsp.yaml": (measure_steps, StepReport),
    "memory.yaml": (measure_memory, MemoryReport),
    "layers.yaml": (measure_layer, LayerReport),
    "snapshots.yaml": (measure_saving, SnapshotReport),
}


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
    say: Say = print,
) -> Report:
    """Returns the report, which has been written to disk. shipped: a file of tables/. file: other tables than those.
    words, only: which cases (select). models: instead of the tables' own."""
    tables = for_models(read_tables(file or TABLES / shipped, job.quick), models or [])
    if job.device == "cpu":  # what runs on the CPU beside a GPU is the same here
        tables = {k: replace(t, cases=[case for case in t.cases if not case.device]) for k, t in tables.items()}
    tables = select(tables, words or ["all"], only)
    measure, report_class = VERBS[shipped]
    report = report_class(Path(shipped).stem, out, command, job.quick, tables)
    run(measure, ordered(tables), job, report, say)
    return report
