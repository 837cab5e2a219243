"""Runs `keyhole bench layers`: every model on the GPU, if there is one, and on the CPU."""

from pathlib import Path

from keyhole.bench.layers.report import LayerReport
from keyhole.bench.layers.worker import Layer, LayerWorker
from keyhole.bench.process import Say, make_job, run_group
from keyhole.bench.report import Record
from keyhole.bench.shapes import named


def bench_layers(
    models: list[str],
    *,
    out: Path,
    command: str,
    batch: int = 4,
    length: int = 1024,
    device: str | None = None,
    quick: bool = False,
    steps: int = 5,
    warm_up: int = 2,
    time_limit_s: float | None = None,
    say: Say = print,
) -> LayerReport:
    """Returns the report, which has been written to disk."""
    for model in models:
        named(model)
    job = make_job(device, quick, warm_up, steps, time_limit_s)
    places = ("cuda", "cpu") if job.device == "cuda" else ("cpu",)
    report = LayerReport(out, command, quick)

    def receive(found: Record) -> None:
        report.add(found)
        if found["kind"] == "case":
            say(" | ".join(report.cells(found)))

    layers = [Layer(model, place, batch, length) for place in places for model in models]
    run_group(LayerWorker, "keyhole.bench.layers.worker", receive, job, layers, say)
    return report
