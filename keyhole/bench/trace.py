"""One streamed step as a Chrome / Perfetto trace: upload, compute and write-back lanes.

The engine records its two lanes itself. The compute lane comes from here: what the caller's stream does
from the moment a page has arrived until the next page is asked for is that page's work (update,
perturbation and all passes through it). The gap before the next span is the wait for its upload.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from keyhole.offload.engine import Engine
from keyhole.offload.timeline import Timeline


@contextmanager
def compute_spans(engine: Engine, timeline: Timeline) -> Iterator[None]:
    """Adds a span to the compute lane for every page that is acquired."""
    acquire, running = engine.acquire, []

    def end_span() -> None:
        for span in running:
            span.__exit__(None, None, None)
        running.clear()

    def traced(page: int) -> torch.Tensor:
        end_span()
        weights = acquire(page)
        running.append(timeline.span("compute", f"page {page}"))
        running[0].__enter__()
        return weights

    engine.acquire = traced
    try:
        yield
    finally:
        end_span()
        del engine.acquire


def trace_step(engine: Engine, step: Any, path: Path) -> None:
    """Saves the trace of a step, after some that fill the pipeline and let it be seen how long the GPU waits."""
    for _ in range(4):
        step()
        torch.cuda.synchronize()
    engine.timeline = Timeline()
    try:
        with compute_spans(engine, engine.timeline):
            step()
        path.parent.mkdir(parents=True, exist_ok=True)
        engine.timeline.save(path)
    finally:
        engine.timeline = Timeline(enabled=False)
