"""A worker frees one model before the next, and always starts from the same weights."""

import gc
import weakref
from typing import Any

import pytest
import torch

import keyhole
from keyhole.bench.process import Job, run_cases
from keyhole.bench.zo.cases import Case
from keyhole.bench.zo.worker import ZoWorker

JOB = Job("cpu", quick=True, warm_up=1, timed=1, deadline_s=4e9)


def test_a_model_is_gone_before_the_next_is_loaded(monkeypatch: Any) -> None:
    """Two models of tens of GiB would not fit side by side."""
    load, alive = keyhole.load, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert not any(ref() for ref in alive), "an earlier model is still in memory"
        model = load(*args, **kwargs)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(keyhole, "load", watched)
    got: list[dict[str, Any]] = []
    base = {"model": "13B", "dtype": "fp32"}
    cases = [Case(system=s, **base) for s in ("resident", "textbook", "streamed")]
    run_cases(ZoWorker, got.append, JOB, [*cases, Case(system="streamed", overlap=False, **base)])
    gc.collect()
    assert [r["status"] for r in got if r["kind"] == "case"] == ["ok"] * 4
    assert len(alive) == 3 and not any(ref() for ref in alive)


@pytest.mark.parametrize("wire", [None, "fp8"])
def test_refresh_brings_back_the_first_weights(wire: str | None) -> None:
    """Whatever was trained before, losses of the next case start where a fresh load would."""
    case = Case("13B", "streamed", dtype="fp32", wire=wire)
    worker = ZoWorker(lambda found: None, JOB)
    before = [x.clone() for _, x in worker.models.ready(case).named_tensors()]
    worker.measure(case)
    worker.models.model.engine.homes[0].add_(1.0)
    after = [x.clone() for _, x in worker.models.ready(case).named_tensors()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    worker.models.close()


def test_the_textbook_loop_has_no_weights_but_its_own() -> None:
    """What keyhole held them in is given back, the loop gets the first ones again, and a resident case loads anew."""
    cases = {system: Case("13B", system, dtype="fp32") for system in ("resident", "textbook")}
    worker = ZoWorker(lambda found: None, JOB)
    first = worker.models.ready(cases["resident"])
    as_loaded = [p.clone() for p in first.module.parameters()]
    expected = worker.measure(cases["resident"])["losses"]
    assert worker.models.ready(cases["textbook"]) is first
    assert sum(home.untyped_storage().nbytes() for home in first.engine.homes) == 0
    assert all(torch.equal(a, b) for a, b in zip(as_loaded, first.module.parameters(), strict=True))
    losses = worker.measure(cases["textbook"])["losses"]
    assert all(torch.isfinite(torch.tensor(losses))) and worker.models.ready(cases["textbook"]) is first
    assert all(torch.equal(a, b) for a, b in zip(as_loaded, first.module.parameters(), strict=True))
    assert worker.measure(cases["resident"])["losses"] == expected and worker.models.model is not first
    worker.models.close()
