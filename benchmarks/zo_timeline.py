"""One streamed zeroth-order step as a Chrome / Perfetto trace: upload, compute and write-back lanes.

    python benchmarks/zo_timeline.py step.json [--case 6.7B-bf16-b1-streamed]          open it in ui.perfetto.dev

The engine records the lanes itself (keyhole/offload/timeline.py): a span of the compute lane is a page's work (update,
perturbation and all passes through it), and the gap before the next one is the wait for its upload.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from keyhole.bench.process import Job
from keyhole.bench.zo.cases import grouped, read_tables, select
from keyhole.bench.zo.worker import ZoWorker
from keyhole.offload.engine import Engine
from keyhole.offload.timeline import Timeline

FILLING = 4  # steps that fill the pipeline and let it be seen how long the GPU waits


def trace_step(engine: Engine, step: Callable[[], object], path: Path) -> None:
    """Saves the trace of a step."""
    for _ in range(FILLING):
        step()
        torch.cuda.synchronize()
    engine.timeline = Timeline()
    try:
        step()
        engine.timeline.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        engine.timeline.save(path)
    finally:
        engine.timeline = Timeline(enabled=False)


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("path", type=Path)
    ask.add_argument("--case", default="6.7B-bf16-b1-streamed", help="a streamed case of `keyhole bench zo`")
    args = ask.parse_args()
    case = grouped(select([args.case], read_tables()))[0][-1]
    worker = ZoWorker(print, Job("cuda", quick=False, warm_up=0, timed=1, deadline_s=0.0))
    model = worker.models.ready(case)
    method, batch = worker.method(model, case), worker.batch(case)
    trace_step(model.engine, lambda: method.step(batch), args.path)


if __name__ == "__main__":
    main()
