"""adam-offload: steps that are not finite or break off, workers that fail: nothing is silent, nothing stays behind."""

import gc
import math
import threading
import weakref
from typing import Any

import pytest
import torch

from keyhole.errors import UserError
from keyhole.methods.adam_offload import updates
from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.offload.workers import WorkerFailed
from tests.methods.adam_offload.test_method import HOW, load, micro, same, weights
from tests.model.decoders import batch
from tests.model.streaming import streamed


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_a_step_that_is_not_finite_changes_nothing(place: str) -> None:
    """A broken loss gives no update, with or without clipping; the next good step goes on as if it had not been."""
    for clip in (0.5, None):
        models = [load(), load()]
        models = [streamed(m) for m in models] if place == "streamed" else models
        how = HOW | {"max_grad_norm": clip, "gpu_updates": place == "streamed"}
        broken, clean = (AdamOffload(m, **how) for m in models)
        for method in (broken, clean):
            method.step(micro(0))
        forward, broken.reverse.forward = broken.reverse.forward, spoilt(broken)
        broken.step(micro(1))
        assert not math.isfinite(float(broken.metrics()["grad_norm"]))
        broken.reverse.forward = forward
        for method in (broken, clean):
            method.flush()
            method.step(micro(2))
        assert same(weights(models[0]), weights(models[1]))


def spoilt(method: AdamOffload) -> Any:
    forward = method.reverse.forward

    def spoilt(*args: Any) -> torch.Tensor:
        loss = forward(*args)
        method.reverse.vocabulary.loss_count = float("nan")
        return loss * float("nan")

    return spoilt


def test_a_step_applied_in_part_stops_the_run() -> None:
    """Without clipping a bad gradient may be met after others were applied: never silently."""
    model = load()
    method = AdamOffload(model, **HOW)
    gradient, before = method.gradient, weights(model)
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in method.state_dict().items()}

    def spoilt(tensor: Any, w: torch.Tensor, grad: torch.Tensor) -> None:
        gradient(tensor, w, grad * float("inf") if "layers.0.mlp" in tensor.name else grad)

    method.gradient = spoilt
    method.step(batch())
    with pytest.raises(UserError, match="last checkpoint"):
        method.flush()
    with pytest.raises(UserError, match="max_grad_norm"):
        method.step(batch())
    assert not same(before, weights(model))
    method.load_state_dict(saved)
    method.gradient = gradient
    assert same(before, weights(model))
    method.step(batch())
    method.flush()


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_an_error_in_the_reverse_leaves_the_weights_as_they_were(place: str) -> None:
    """With clipping nothing is applied yet: the step can be tried again. Without, it may be too late, and is said."""
    for clip in (0.5, None):
        models = [load(), load()]
        models = [streamed(m) for m in models] if place == "streamed" else models
        broken, clean = (AdamOffload(m, max_grad_norm=clip, **HOW) for m in models)
        gradient = broken.gradient

        def fail(tensor: Any, w: torch.Tensor, grad: torch.Tensor, gradient: Any = gradient) -> None:
            gradient(tensor, w, grad)
            if "layers.0.mlp" in tensor.name:
                raise MemoryError("no room")

        broken.gradient = fail
        with pytest.raises(UserError, match="no room"):
            broken.step(micro(0))
        broken.gradient = gradient
        if clip is None:
            with pytest.raises(UserError, match="last checkpoint"):
                broken.flush()
            continue
        assert same(weights(models[0]), weights(models[1]))
        for method in (broken, clean):
            method.step(micro(1))
        assert same(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_an_interrupt_at_the_end_of_the_reverse_is_said(place: str) -> None:
    """Updates wait for the last norm: if only some were submitted, or weights did not return, the step is broken."""
    model = load() if place == "resident" else streamed(load())
    method = AdamOffload(model, max_grad_norm=0.5, **HOW)
    submit, count = method.exchange.submit, []

    def interrupted(*args: Any, **more: Any) -> None:
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        submit(*args, **more)

    method.exchange.submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        method.step(batch())
    with pytest.raises(UserError, match="last checkpoint"):
        method.flush()
    assert all(tensor.isfinite().all() for tensor in weights(model).values()) and not method.exchange.leaving
    method.close()


def test_everything_goes_with_the_method() -> None:
    """Dropped without a word, with updates under way: threads end and host memory is given back; the model stays."""
    model = load()
    for _ in range(2):
        method = AdamOffload(model, max_grad_norm=0.5, gpu_updates=True, **HOW)
        method.step(batch())
        threads = list(method.updates.pool._threads)
        parts = [weakref.ref(part) for part in (method, method.updates, method.exchange)]
        del method
        gc.collect()
        assert not any(thread.is_alive() for thread in threads) and not any(part() for part in parts)
        assert model.engine.gate is None
    method = AdamOffload(model, **HOW)
    method = AdamOffload(model, **HOW)  # the first is dropped, and leaves the gate of the second
    gc.collect()
    assert model.engine.gate is method.exchange


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_a_worker_that_fails_stops_the_run_with_its_cause(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after it, or flush, raises the cause; no thread is left and nothing hangs."""
    model = load() if place == "resident" else streamed(load())
    method = AdamOffload(model, **HOW)
    method.step(batch())
    method.flush()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("the host is full")

    monkeypatch.setattr("keyhole.methods.adam_offload.updates.host_adamw_", fail)
    with pytest.raises(WorkerFailed, match="the host is full") as caught:
        for _ in range(3):
            method.step(batch())
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(WorkerFailed):
        method.flush()
    method.updates.pool._threads[0].join(10)
    assert method.updates.pool._threads[0] not in threading.enumerate()
    method.close()


def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Updates wait for this event."""
    release, update = threading.Event(), updates.host_adamw_

    def after(*args: Any, **options: Any) -> None:
        assert release.wait(20)
        update(*args, **options)

    monkeypatch.setattr(updates, "host_adamw_", after)
    return release


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_updates_under_way_are_made_when_the_method_is_dropped(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those after the last step, though nobody flushed: never gradients in their place."""
    models = [load(), load()]
    models = [streamed(m) for m in models] if place == "streamed" else models
    flushed = AdamOffload(models[0], **HOW)
    flushed.step(batch())
    flushed.flush()
    release = held(monkeypatch)
    dropped = AdamOffload(models[1], **HOW)
    dropped.step(batch())
    weakref.finalize(dropped, release.set)
    del dropped
    gc.collect()
    assert release.is_set() and models[1].engine.gate is None
    assert same(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_a_new_method_begins_after_updates_under_way(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fp32 weights are those after the last step of the method before, not gradients that wait in their place."""
    model = load() if place == "resident" else streamed(load())
    first, release, wait = AdamOffload(model, **HOW), held(monkeypatch), model.engine.wait_for_homes
    first.step(batch())

    def released(*pages: Any) -> None:
        release.set()
        wait(*pages)

    model.engine.wait_for_homes = released
    second = AdamOffload(model, **HOW)
    release.set()
    first.flush()
    masters = second.state_dict()
    assert all(torch.equal(masters[f"{name}/master"], tensor) for name, tensor in weights(model).items())


def test_after_an_update_that_failed_the_weights_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the method is gone: homes may hold gradients, and whoever reads them gets the cause."""
    model = streamed(load())
    method, release = AdamOffload(model, **HOW), threading.Event()

    def fail(*args: Any, **options: Any) -> None:
        assert not release.wait(20), "the host is full"

    monkeypatch.setattr(updates, "host_adamw_", fail)
    method.step(batch())
    weakref.finalize(method, release.set)
    del method
    gc.collect()
    with pytest.raises(WorkerFailed):
        weights(model)
