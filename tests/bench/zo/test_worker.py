"""A worker frees one model before the next, and always starts from the same weights."""

import gc
import weakref
from typing import Any

import pytest
import torch

from keyhole.bench import worker as worker_module
from keyhole.bench.cases import Case
from keyhole.bench.trace import compute_spans
from keyhole.bench.worker import Worker
from keyhole.offload.engine import Engine


def make(emit: Any) -> Worker:
    return Worker(emit, "cpu", quick=True, warm_up=1, timed=1)


def test_a_model_is_gone_before_the_next_is_loaded(monkeypatch: Any) -> None:
    """Two models of tens of GiB would not fit side by side."""
    load, alive = worker_module.keyhole.load, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert not any(ref() for ref in alive), "an earlier model is still in memory"
        model = load(*args, **kwargs)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(worker_module.keyhole, "load", watched)
    got: list[dict[str, Any]] = []
    base = {"model": "13B", "dtype": "fp32"}
    cases = [Case(system=s, **base) for s in ("resident", "textbook", "streamed")]
    make(got.append).run([*cases, Case(system="streamed", overlap=False, **base)], deadline_s=4e9)
    gc.collect()
    assert [r["status"] for r in got if r["kind"] == "case"] == ["ok"] * 4
    assert len(alive) == 3 and not any(ref() for ref in alive)


@pytest.mark.parametrize("wire", [None, "fp8"])
def test_refresh_brings_back_the_first_weights(wire: str | None) -> None:
    """Whatever was trained before, losses of the next case start where a fresh load would."""
    case = Case("13B", "streamed", dtype="fp32", wire=wire)
    worker = make(lambda found: None)
    before = [x.clone() for _, x in worker.kept.ready(case).named_tensors()]
    worker.measure(case)
    worker.kept.model.engine.homes[0].add_(1.0)
    after = [x.clone() for _, x in worker.kept.ready(case).named_tensors()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    worker.kept.close()


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
