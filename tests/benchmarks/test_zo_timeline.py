"""benchmarks/zo_timeline.py: the compute lane of a trace."""

import torch

from benchmarks.zo_timeline import compute_spans
from keyhole.offload.engine import Engine


def test_compute_spans_follow_the_pages() -> None:
    """A page's span ends when the next is asked for; the engine is as before afterwards."""
    homes = [torch.zeros(4), torch.ones(4), torch.full((4,), 2.0)]
    engine = Engine(homes, {1, 2}, torch.device("cpu"))
    events: list[str] = []

    class Recorder:
        """Stands in for a Timeline, which needs a GPU."""

        def span(self, lane: str, label: str) -> "Recorder":
            events.append(f"{lane} {label}")
            return self

        def __enter__(self) -> None:
            events.append("begin")

        def __exit__(self, *exc: object) -> None:
            events.append("end")

    with compute_spans(engine, Recorder()), engine.sweep("test", [1, 2]):
        for page in (1, 2):
            assert torch.equal(engine.acquire(page), homes[page])
            engine.release(page)
    assert events == ["compute page 1", "begin", "end", "compute page 2", "begin", "end"]
    assert "acquire" not in vars(engine)
