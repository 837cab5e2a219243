"""What a method brings to the model that it is made on: updates that wait, and weights beside the model's own."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods.lsp.method import LSP
from tests.model.decoders import batch, load
from tests.model.streaming import streamed

SMALL = {"d": 16, "r": 2}


def homes(model: keyhole.Model) -> list[torch.Tensor]:
    return [model.home(tensor).clone() for tensor in model.layout.tensors]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Method:
    """Notes when its deferred updates are applied."""

    addon, is_whole = None, True

    def __init__(self, model: keyhole.Model, name: str) -> None:
        self.name, self.log = name, []
        model.methods.attach(self)

    @property
    def deferred(self) -> Callable[[], None]:
        log, name = self.log, self.name
        return lambda: log.append(name)


def test_what_was_deferred_is_applied_before_others_see_the_weights() -> None:
    model = load()
    first = Method(model, "first")
    second = Method(model, "second")
    assert first.log == ["first"]
    model.apply_deferred(before_step_of=second)
    assert len(first.log) == 2 and second.log == []
    model.nll(batch())
    dict(model.named_tensors())
    assert len(first.log) == 4 and len(second.log) == 2


def test_what_a_method_deferred_outlives_it_and_the_method_does_not() -> None:
    model = load()
    method = Method(model, "gone")
    log, gone = method.log, weakref.ref(method)
    del method
    gc.collect()
    assert gone() is None
    model.apply_deferred()
    Method(model, "next")
    assert log == ["gone", "gone"]
    model.apply_deferred()
    assert log == ["gone", "gone"]


@pytest.mark.parametrize("other", [keyhole.LOMO, keyhole.AdamW, keyhole.AdamOffload, keyhole.ZO])
def test_methods_that_take_turns_see_each_others_steps(other: Any) -> None:
    losses = []
    for flushes in (True, False):
        model = load()
        zo, second = keyhole.ZO(model, 1e-2), other(model, 1e-2)
        zo.step(batch(seed=1))
        if flushes:
            zo.flush()
        losses.append(float(second.step(batch(seed=2))))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("first", [keyhole.ZO, keyhole.LOMO, keyhole.AdamOffload])
@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_masters_follow_the_steps_of_another_method(place: str, first: Any) -> None:
    """adam-offload at the rate 0 leaves the weights as the method before has left them, although its fp32 copy is
    older; and so does the other one after that."""
    model = load() if place == "resident" else streamed(load())
    one, second = first(model, 1e-2), keyhole.AdamOffload(model, 0.0)
    one.step(batch(seed=1))
    one.flush()
    between = homes(model)
    second.step(batch(seed=2))
    second.flush()
    assert same(homes(model), between)
    one.lr = 0.0
    one.step(batch(seed=3))
    one.flush()
    assert same(homes(model), between)


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.3}, {"optimizer_on": "cpu"}])
def test_lsp_without_a_flush_is_seen_after_its_last_step(options: dict[str, Any]) -> None:
    found = []
    for flushes in (True, False):
        model = streamed(load(), slot_count=3)
        opt = LSP(model, 1e-2, **SMALL, **options)
        opt.step(batch(seed=1))
        if flushes:
            opt.flush()
        found.append((model.nll(batch(seed=2))[0], homes(model)))
    assert torch.equal(found[0][0], found[1][0]) and same(found[0][1], found[1][1])


def test_adapters_stay_when_another_method_is_attached() -> None:
    model = load()
    lora = keyhole.LoRA(model, 1e-2, r=2)
    assert model.methods.addon is lora.addon and lora.params
    Method(model, "next")
    assert model.methods.addon is lora.addon
